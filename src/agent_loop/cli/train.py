"""`agent-loop train` and `agent-loop sft`: train a model on rollouts, or on complete conversations."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from agent_loop.cli.arguments import (
    ConfigArgument,
    OverridesArgument,
    OverwriteOption,
    ResumeFromOption,
    ResumeOption,
    read_config,
)
from agent_loop.cli.running import EXIT_INTERRUPTED, DryRunOption, run_checks
from agent_loop.cli.verbosity import VERBOSITY, print_hint
from agent_loop.config import Config
from agent_loop.errors import CheckpointError, ConfigError
from agent_loop.runtime.event_loop import run_to_end


def train_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    resume: ResumeOption = False,
    resume_from: ResumeFromOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train a model with reinforcement learning on rollouts of agent loops.

    Each step samples rows, runs agent loops, computes rewards and advantages, updates the model and sends the new
    weights to the servers. Ctrl-C finishes the step, writes a checkpoint and stops; a second Ctrl-C stops immediately.

    Examples:

        agent-loop train config.yaml

        agent-loop train config.yaml actor.lr=1e-5 rollout.n=16 trainer.run_dir=runs/second

        agent-loop train config.yaml --dry-run

        agent-loop train config.yaml --resume trainer.total_steps=200

        agent-loop train config.yaml trainer.num_processes=4

        torchrun --nproc-per-node 4 -m agent_loop train config.yaml
    """
    settings = read_config(config, overrides)
    source = _source(resume, resume_from, overwrite=overwrite)
    _check(settings, is_supervised=False, source=source, overwrite=overwrite, is_dry_run=dry_run)
    if dry_run:
        return

    # late: keeps `--help` and config errors quick
    from agent_loop.training.ppo_trainer import PPOTrainer
    from agent_loop.training.ranks import is_nonzero_rank, run_rank, seeing_own_devices

    if is_nonzero_rank():
        with seeing_own_devices(settings) as local_rank:
            run_rank(settings, local_rank=local_rank)
        return
    _fit(PPOTrainer, settings, source=source, overwrite=overwrite)


def sft_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    resume: ResumeOption = False,
    resume_from: ResumeFromOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train a model on complete conversations, or on stored trajectories (supervised fine-tuning).

    Conversations are messages in the OpenAI form, with tools. The tokens of the assistant's turns are trained, as a
    rollout would sample them. The folder of a run in `sft.files` trains on the tokens that its model sampled. Ctrl-C
    finishes the step, writes a checkpoint and stops.

    Examples:

        agent-loop sft config.yaml sft.files=[chats.jsonl] sft.epochs=2 actor.lr=1e-5

        agent-loop sft config.yaml sft.files=[runs/train] "sft.where=[reward>=1]" sft.best_of_group=1

        agent-loop sft config.yaml --dry-run

        agent-loop sft config.yaml --resume
    """
    settings = read_config(config, overrides)
    source = _source(resume, resume_from, overwrite=overwrite)
    _check(settings, is_supervised=True, source=source, overwrite=overwrite, is_dry_run=dry_run)
    if dry_run:
        return

    # late: keeps `--help` and config errors quick
    from agent_loop.training.ranks import is_nonzero_rank, run_rank
    from agent_loop.training.supervised.sources import supervised_config
    from agent_loop.training.supervised.trainer import SupervisedTrainer

    if is_nonzero_rank():
        run_rank(supervised_config(settings), local_rank=int(os.environ["LOCAL_RANK"]))
        return
    _fit(SupervisedTrainer, settings, source=source, overwrite=overwrite)


def _source(resume: bool, resume_from: Path | None, *, overwrite: bool) -> str | bool:
    """Return what a trainer resumes from: a path, `auto` for the run in the folder, or False."""
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; give one of them")
    if resume_from is not None and not resume_from.is_dir():
        raise CheckpointError(
            f"--resume-from is {str(resume_from)!r}, which does not exist; give a checkpoint, or the folder of a "
            "training run"
        )
    return str(resume_from) if resume_from else resume and "auto"


def _check(
    settings: Config, *, is_supervised: bool, source: str | bool, overwrite: bool, is_dry_run: bool
) -> None:
    """Check the run, in one process: of several, in that of rank 0."""
    from agent_loop.checks.before_start import PlannedRun, checks_of, supervised_checks  # late

    if not is_dry_run and os.environ.get("RANK", "0") != "0":
        return
    sources = {"data.train_files": settings.data.train_files}
    if settings.trainer.val_every is not None or settings.trainer.val_before_train:
        sources["data.val_files"] = settings.data.val_files
    run = PlannedRun(
        settings,
        sources=sources,
        trains=True,
        resumes=bool(source),
        overwrites=overwrite,
        is_thorough=is_dry_run,
    )
    run_checks(supervised_checks(run) if is_supervised else checks_of(run), is_dry_run=is_dry_run)


def _fit(trainer: Callable[..., Any], settings: Config, *, source: str | bool, overwrite: bool) -> None:
    console = Console(quiet=VERBOSITY.quiet)
    result = run_to_end(trainer(settings, resume=source, overwrite=overwrite, console=console).fit())
    if result.is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    typer.echo(f"the run is in {result.run_dir}")
    print_hint(
        Console(),
        f"look at it with: agent-loop view {result.run_dir}; "
        f"export the model with: agent-loop export {result.run_dir} --out FOLDER",
    )
