"""`agent-loop export`: write the model of a checkpoint as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from agent_loop.cli.arguments import WhereOption, find_checkpoint_source, find_run
from agent_loop.cli.verbosity import print_hint
from agent_loop.storage.columns import to_json
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.query import Condition, preference_pairs
from agent_loop.storage.run import StoredRun


def export_command(
    source: Annotated[
        Path, typer.Argument(help="Folder of a checkpoint, or of a run, for its last checkpoint.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder to write; with `--pairs`, a .jsonl file.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", help="Precision of the weights; by default `model.dtype`."),
    ] = None,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="Write only the LoRA adapters, in the format of `peft`.")
    ] = False,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="Write preference pairs of stored trajectories instead of a model: the best and the worst of each "
            "group.",
        ),
    ] = False,
    where: WhereOption = None,
) -> None:
    """Write the model of a checkpoint as a plain Hugging Face folder: weights, tokenizer, chat template.

    LoRA adapters are merged into the weights that they adapt. With `--pairs`, write the preference pairs of a run as
    messages, in the columns `prompt`, `chosen` and `rejected` that TRL's `DPOTrainer` reads.

    Examples:

        agent-loop export runs/train --out trained

        agent-loop export runs/train/checkpoints/step-000040 --out trained --dtype bfloat16

        agent-loop export runs/lora --out adapter --keep-adapter

        agent-loop export runs/train --pairs --out pairs.jsonl --where 'split=train' --where 'step>=50'
    """
    if pairs:
        _export_pairs(source, out, where=where)
        return
    if where:
        raise typer.BadParameter("--where selects trajectories, so it needs --pairs")
    # late: keeps `--help` quick
    from agent_loop.training.checkpoint import MODEL_FOLDER, named_checkpoint
    from agent_loop.training.export import export_model

    checkpoint = named_checkpoint(find_checkpoint_source(source), parts=[MODEL_FOLDER])
    export_model(checkpoint, out, dtype=dtype, keep_adapter=keep_adapter)
    typer.echo(f"step {checkpoint.step} is in {out}")
    if not keep_adapter:
        print_hint(
            Console(), f"serve it with: agent-loop serve {out}; train or evaluate it with: model.path={out}"
        )


def _export_pairs(source: Path, out: Path, *, where: list[str] | None) -> None:
    conditions = [Condition.parse(each) for each in where or ()]
    count = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for pair in preference_pairs(StoredRun(find_run(source)), where=conditions):
            file.write(to_json(pair) + "\n")
            count += 1
    typer.echo(f"{count} preference pairs are in {out}")
    print_hint(Console(), f'load them with: datasets.load_dataset("json", data_files="{out}")')
