"""`agent-loop init`: write a folder with a small task that trains as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agent_loop.cli.verbosity import print_line
from agent_loop.errors import OutputError
from agent_loop.files.file_kinds import refuse_existing

STARTERS = Path(__file__).parent / "starters"
COMMON = "common"
"""Starter whose files are in every folder."""
CONVERSATIONS = {
    "tool": "with_tools",
    "program": "with_tools",
    "interaction": "in_words",
    "environment": "in_words",
}
"""Starter with the rows and demonstrations of each way to write the agent."""
MODEL = "model"
"""Folder of the model, as in the `config.yaml` of each starter."""


class Starter(StrEnum):
    """Way to write the agent."""

    TOOL = "tool"
    INTERACTION = "interaction"
    PROGRAM = "program"
    ENVIRONMENT = "environment"


def init_command(
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    *,
    template: Annotated[
        Starter,
        typer.Option(
            help="`tool`: functions that the model calls. `interaction`: somebody who replies. `program`: a program "
            "on the OpenAI client. `environment`: a class with a state, replies and a reward."
        ),
    ] = Starter.TOOL,
    model: Annotated[
        str | None, typer.Option(help="Train this model folder or hub name, and make no tiny model.")
    ] = None,
) -> None:
    """Write a folder with a small task that trains as it is: task, reward, rows, config, tests and a tiny model.

    The task takes two look-ups, one after the other. The tiny model knows the format and succeeds sometimes. Replace
    `task.py` and the rows with your own, step by step.

    Examples:

        agent-loop init shelf

        agent-loop init shelf --template program

        agent-loop init shelf --model Qwen/Qwen3-0.6B
    """
    refuse_existing(folder)
    try:
        for part in (COMMON, CONVERSATIONS[template.value], template.value):
            shutil.copytree(
                STARTERS / part, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
    except shutil.Error as error:
        _, to, reason = error.args[0][0]
        raise OutputError(
            f"{to!r} cannot be written ({reason}); free the disk, or give another folder"
        ) from error
    commands = [["make_data.py"]]
    if model is None:
        commands.append(["-m", "agent_loop", "make-model", MODEL, "--config", "config.yaml"])
    else:
        _use_model(folder / "config.yaml", model)
    console = Console()
    for arguments in commands:
        shown = " ".join(["agent-loop", *arguments[2:]] if arguments[0] == "-m" else ["python", *arguments])
        console.print(f"[dim]$ {shown}[/]", highlight=False, soft_wrap=True)
        status = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        ).returncode
        if status:
            raise typer.Exit(status)
    files = ", ".join(sorted(path.name for path in folder.iterdir()))
    print_line(console, f"{folder}: {files}")
    print_line(
        console, f"\nNext:\n\n    cd {folder}\n    agent-loop train config.yaml\n    agent-loop view run\n"
    )


def _use_model(config: Path, model: str) -> None:
    """Train adapters of a model of the user, with room for the prompts and turns of one that others trained."""
    text = config.read_text(encoding="utf-8")
    for tiny, pretrained in (
        (f"  path: {MODEL}\n  device: cpu\n", f"  path: {model}\n  dtype: bfloat16\n  lora_rank: 16\n"),
        ("  prompt_length: 64  ", "  prompt_length: 1024"),
        ("  response_length: 128\n", "  response_length: 512\n"),
        ("  lr: 3.0e-4\n", "  lr: 1.0e-4\n"),
    ):
        text = text.replace(tiny, pretrained)
    config.write_text(text, encoding="utf-8")
