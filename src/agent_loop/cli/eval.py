"""`agent-loop eval`: evaluate a model on rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from agent_loop.cli.arguments import (
    ConfigArgument,
    DataOption,
    JsonLinesOption,
    MaxRowsOption,
    ModelOption,
    OverridesArgument,
    SamplesOption,
    find_checkpoint_source,
    load_named_rows,
    read_config,
)
from agent_loop.cli.eval_tables import print_summary
from agent_loop.cli.running import EXIT_INTERRUPTED, DryRunOption, by_id, check_rollout, key_of, run_rows
from agent_loop.cli.verbosity import print_hint, print_line
from agent_loop.config import Config
from agent_loop.errors import ConfigError, DataError, JournalError, OutputError, RolloutError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.storage.exclusive import exclusive_folder
from agent_loop.storage.json_lines import write_lines, writing_lines
from agent_loop.storage.writer import write_trajectories
from agent_loop.training.evaluation.scores import categories_of, prompt_digest, summarise
from agent_loop.training.evaluation.summary import SUMMARY_FILE, EvaluationSummary, read_summary
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

if TYPE_CHECKING:
    from agent_loop.rollout.journal import StepKey

SPLIT = "eval"


def eval_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for trajectories and summary.")] = Path(
        "runs/eval"
    ),
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            help="Model to evaluate: a checkpoint, a run (its last checkpoint), or the folder of a model.",
        ),
    ] = None,
    model: ModelOption = None,
    data: DataOption = None,
    on: Annotated[
        Literal["val", "train"] | None,
        typer.Option(
            "--on",
            help="Evaluate the rows of `data.val_files`, or those of `data.train_files`, which training uses.",
            show_default="val",
        ),
    ] = None,
    max_rows: MaxRowsOption = None,
    n: SamplesOption = None,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="COLUMN",
            help="Print scores per value of this column, such as extra_info.level. May be given more than once.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", help="Folder of another evaluation to compare with, row by row."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the evaluation in `--out`, or show it if it is finished.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the evaluation in `--out`.")
    ] = False,
    jsonl: JsonLinesOption = False,
    table_rows: Annotated[int, typer.Option("--table-rows", min=0, help="Rows of the per-row table.")] = 50,
    dry_run: DryRunOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Evaluate a model on rows: pass@k and rewards with 95% confidence intervals, in total and per category.

    Uses the rows of `data.val_files` unless `--data` or `--on train` is given, and the sampling settings of
    `rollout.val`. Set `rollout.server_urls` to evaluate running servers. Ctrl-C stops with exit code 130; `--resume`
    resumes an evaluation that was stopped or crashed.

    Examples:

        agent-loop eval config.yaml

        agent-loop eval config.yaml -n 8 --checkpoint runs/train --by level --out evals/trained

        agent-loop eval config.yaml -n 8 --by level --out evals/base --compare evals/trained

        agent-loop eval config.yaml rollout.engine=vllm 'rollout.server_urls=[http://host:8000]' --json

        agent-loop eval config.yaml --out evals/trained --resume
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one of them")
    settings = _settings(config, overrides, checkpoint=checkpoint, model=model)
    rows_of, sources = _sources(settings, data=data, on=on)
    rows = load_named_rows(settings, sources, max_rows=max_rows)
    check_rollout(settings, rows=rows, is_dry_run=dry_run)
    if dry_run:
        return
    columns = {column: categories_of(rows, column=column) for column in by or ()}
    other = compare and (compare, _read_other(compare, rows=rows))
    num_samples = n or settings.rollout.val.n
    key = key_of(settings, rows=rows, num_samples=num_samples)
    folder, console = EvalFolder(out), Console(stderr=as_json)
    with exclusive_folder(out, name="--out"):
        folder.begin(resume=resume, overwrite=overwrite)
        finished = folder.finished(key) if resume else None
        print_line(console, f"rows of {rows_of}: {', '.join(sources)}")
        trajectories: Sequence[Trajectory] = ()
        if finished is None:
            trajectories = _run(
                settings, rows=rows, num_samples=num_samples, folder=folder, resume=resume, console=console
            )
            evaluation = summarise(trajectories, success_threshold=settings.reward.success_threshold)
        else:
            evaluation = finished.evaluation
        summary = EvaluationSummary.of(
            evaluation,
            model=settings.model.path,
            rows_of=rows_of,
            settings=asdict(key),
            columns=columns,
            other=other,
        )
        if finished is None:
            folder.finish(
                trajectories,
                summary=summary,
                success_threshold=settings.reward.success_threshold,
                as_jsonl=jsonl,
            )
    if as_json:
        typer.echo(summary.model_dump_json(indent=2))
    else:
        print_summary(summary, console=console, num_rows=table_rows)
    print_line(console, f"results in {out}")
    print_hint(
        console,
        f"look at the trajectories with: agent-loop view {out}; compare another evaluation with: "
        f"agent-loop eval {config} --out OTHER --compare {out}",
    )


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """Folder of an evaluation.

    It holds `trajectories.jsonl`, in the order in which they end, and the turns in `rollout.journal` during the
    evaluation. The sorted `trajectories.parquet` and the scores in `summary.json` take their place at the end.
    """

    path: Path

    @property
    def summary(self) -> Path:
        return self.path / SUMMARY_FILE

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "rollout.journal"

    def begin(self, *, resume: bool, overwrite: bool) -> None:
        """Prepare the folder. A new evaluation may replace another one with `overwrite` alone."""
        files = [file for file in (self.summary, self.journal) if file.exists()]
        if resume:
            if files:
                return
            raise JournalError(
                f"{str(self.path)!r} holds no evaluation to resume; run the command without --resume, or give the "
                "evaluation's folder with --out"
            )
        if files and not overwrite:
            what = "a finished" if self.summary in files else "an unfinished"
            raise ConfigError(
                f"{str(self.path)!r} holds {what} evaluation; resume it with --resume, replace it with --overwrite, or "
                "give another folder with --out"
            )
        for file in files:
            file.unlink()

    def finished(self, key: StepKey) -> EvaluationSummary | None:
        """Return the summary of a finished evaluation, or None if the evaluation can be resumed."""
        from agent_loop.rollout.journal import StepKey  # late: keeps `--help` quick

        if not self.summary.exists():
            return None
        summary = read_summary(self.summary)
        changed = key.differences(StepKey(**summary.settings))
        if changed:
            raise JournalError(
                f"{str(self.path)!r} holds another evaluation: {', '.join(changed)} changed; restore the settings to "
                "show it, or give another folder with --out"
            )
        return summary

    def finish(
        self,
        trajectories: Sequence[Trajectory],
        *,
        summary: EvaluationSummary,
        success_threshold: float,
        as_jsonl: bool,
    ) -> None:
        """Write the sorted trajectories and the summary. With `as_jsonl`, keep JSON lines too."""
        in_order, stored = sorted(trajectories, key=by_id), self.trajectories.with_suffix(".parquet")
        try:
            write_trajectories(stored, in_order, step=0, split=SPLIT, success_threshold=success_threshold)
            if as_jsonl:
                write_lines(self.trajectories, in_order, split=SPLIT)
            else:
                self.trajectories.unlink(missing_ok=True)
            summary.write(self.summary)
            self.journal.unlink(missing_ok=True)
        except OSError as error:
            kept = f"the finished trajectories are in {str(self.trajectories)!r}"
            if self.journal.exists():
                kept += " and in the journal. Free the disk, and run the same command with --resume"
            raise OutputError(
                f"{str(self.path)!r} cannot be written ({describe_error(error)}); {kept}"
            ) from error


def _sources(
    config: Config, *, data: Sequence[str] | None, on: Literal["val", "train"] | None
) -> tuple[str, Sequence[str]]:
    """Return the option or setting of the rows, and their sources. Training rows are used only with `--on train`."""
    if data:
        if on is not None:
            raise ConfigError(f"--data and --on {on} both select rows; give only one of them")
        return "--data", data
    split = on or "val"
    name, sources = f"data.{split}_files", config.data.train_files if on == "train" else config.data.val_files
    if sources:
        return name, sources
    hint = "give rows with --data, set it"
    if split == "val" and config.data.train_files:
        hint += ", or evaluate the training rows with --on train"
    raise ConfigError(f"{name} is empty, so there are no rows to evaluate; {hint}")


def _settings(
    config: Path, overrides: Sequence[str] | None, *, checkpoint: Path | None, model: str | None
) -> Config:
    """Return the configuration with the model to evaluate."""
    if checkpoint is None:
        return read_config(config, overrides, model=model)
    if model is not None:
        raise ConfigError(
            f"--checkpoint {checkpoint} and --model {model} both select a model; give only one of them"
        )
    folder = checkpoint
    if not (folder / "config.json").is_file():
        from agent_loop.training.export import evaluated_model  # late: needs torch

        folder = evaluated_model(find_checkpoint_source(checkpoint))
    settings = read_config(config, overrides, model=str(folder))
    if settings.rollout.server_urls:
        raise ConfigError(
            f"--checkpoint is {str(checkpoint)!r}, but the servers of rollout.server_urls have their own weights; "
            "remove one of the two"
        )
    return settings


def _read_other(path: Path, *, rows: Sequence[Row]) -> EvaluationSummary:
    """Return the evaluation to compare with."""
    summary = read_summary(path)
    if not {row.prompt_digest for row in summary.evaluation.rows} & set(map(prompt_digest, rows)):
        raise DataError(
            f"--compare is {str(path)!r}, which shares no rows with this evaluation; give one of the same rows"
        )
    return summary


def _run(
    config: Config,
    *,
    rows: Sequence[Row],
    num_samples: int,
    folder: EvalFolder,
    resume: bool,
    console: Console,
) -> list[Trajectory]:
    """Run the rows. A resumed evaluation runs only the unfinished rows."""
    finished: list[Trajectory] = []
    try:
        with writing_lines(folder.trajectories, split=SPLIT) as write:

            def keep(trajectory: Trajectory) -> None:
                write(trajectory)
                finished.append(trajectory)

            running = run_rows(
                config,
                rows=rows,
                n=num_samples,
                validate=True,
                console=console,
                on_trajectory=keep,
                journal_path=folder.journal if config.rollout.journal else None,
                resume=resume,
            )
            return run_to_end(running)
    except (KeyboardInterrupt, RolloutError) as error:
        print_line(
            console, f"stopped; the {len(finished)} finished trajectories are in {folder.trajectories}"
        )
        if folder.journal.exists():
            print_line(console, "resume with the same command and --resume")
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(EXIT_INTERRUPTED) from error
        raise
