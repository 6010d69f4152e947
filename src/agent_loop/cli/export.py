"""`agent-loop export`: write the model of a checkpoint as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agent_loop.cli.arguments import find_checkpoint_source


def export_command(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of a checkpoint, or of a run, for its last checkpoint.", show_default=False
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder to write.", show_default=False)],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(
            "--dtype", help="Precision of the weights; by default `model.dtype`.", show_default=False
        ),
    ] = None,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="Write only the LoRA adapters, in the format of `peft`.")
    ] = False,
) -> None:
    """Write the model of a checkpoint as a plain Hugging Face folder: weights, tokenizer, chat template.

    LoRA adapters are merged into the weights that they adapt.

    Examples:

        agent-loop export runs/train --out trained

        agent-loop export runs/train/checkpoints/step-000040 --out trained --dtype bfloat16

        agent-loop export runs/lora --out adapter --keep-adapter
    """
    # late: keeps `--help` quick
    from agent_loop.training.checkpoint import MODEL_FOLDER, named_checkpoint
    from agent_loop.training.export import export_model

    checkpoint = named_checkpoint(find_checkpoint_source(source), parts=[MODEL_FOLDER])
    export_model(checkpoint, out, dtype=dtype, keep_adapter=keep_adapter)
    typer.echo(f"step {checkpoint.step} is in {out}")
