"""`agent-loop export`: from a checkpoint to a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agent_loop.cli.arguments import find_checkpoint_source


def export_command(
    source: Annotated[
        Path,
        typer.Argument(help="A checkpoint, or a run, whose last one is taken.", show_default=False),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", help="The folder to write.", show_default=False)],
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", help="Of the weights; else that of `model.dtype`.", show_default=False),
    ] = None,
    keep_adapter: Annotated[
        bool, typer.Option("--keep-adapter", help="Write LoRA adapters alone, as `peft` loads them.")
    ] = False,
) -> None:
    """Write the model of a checkpoint as a plain Hugging Face folder: weights, tokenizer, chat template.

    LoRA adapters are merged into the weights below them.

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
