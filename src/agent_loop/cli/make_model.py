"""`agent-loop make-model`: make a small model and its tokenizer for a task."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agent_loop.cli.arguments import read_config
from agent_loop.cli.verbosity import VERBOSITY, print_hint
from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.files.file_kinds import refuse_existing
from agent_loop.runtime.event_loop import run_to_end

DEFAULT_STEPS = 400


class SizeChoice(StrEnum):
    """Size of the model."""

    TINY = "tiny"
    SMALL = "small"


def make_model_command(
    out: Annotated[Path, typer.Argument(help="New folder of the model.")],
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of a run: its `data.train_files`, `sft.files`, tools and `trainer.seed` are used where an "
            "option is not given."
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--from-rows", help="Rows of the task, in any form of `data.train_files`."),
    ] = None,
    demonstrations: Annotated[
        list[str] | None,
        typer.Option("--demonstrations", help="Complete conversations, in any form of `data.train_files`."),
    ] = None,
    tools: Annotated[
        list[str] | None, typer.Option("--tool", help="Tool of the task, as in `rollout.multi_turn.tools`.")
    ] = None,
    size: Annotated[
        SizeChoice, typer.Option(help="`tiny`: 150,000 parameters. `small`: 4,000,000.")
    ] = SizeChoice.TINY,
    steps: Annotated[int, typer.Option(help="Optimiser steps on the demonstrations.", min=0)] = DEFAULT_STEPS,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the weights and of the order of demonstrations.", min=0)
    ] = None,
) -> None:
    """Make a small model and its tokenizer for a task, from random weights, on a CPU.

    The tokenizer learns the phrases of the rows and demonstrations, so that a tool call is about a dozen tokens. The
    model is then trained on the demonstrations. It is meant for trying out a task, its tools and its reward in minutes.

    Examples:

        agent-loop make-model model --config config.yaml

        agent-loop make-model model --from-rows rows.jsonl

        agent-loop make-model model --from-rows rows.jsonl --demonstrations demos.jsonl --tool task.py:lookup
    """
    refuse_existing(out)  # before the imports and the rows, which take seconds
    settings = Config() if config is None else read_config(config, None)
    multi_turn = settings.rollout.multi_turn
    sources = rows or settings.data.train_files
    if not sources:
        raise ConfigError("there are no rows; give --from-rows, or --config with data.train_files")

    # late: keeps `--help` and config errors quick
    from agent_loop.chat.messages import shown_tool
    from agent_loop.tiny_models.model import Size
    from agent_loop.tools.registry import load_tools
    from agent_loop.training.supervised.task_model import TaskTexts, make_task_model

    loaded = load_tools(
        multi_turn.tools if tools is None else tools,
        config_path=multi_turn.tool_config_path if tools is None else None,
    )
    texts = TaskTexts.load(
        sources,
        settings.sft.files if demonstrations is None else demonstrations,
        prompt_key=settings.data.prompt_key,
        messages_key=settings.sft.messages_key,
        tools=[shown_tool(tool.tool_schema) for tool in loaded.values()],
    )
    run_to_end(
        make_task_model(
            out,
            texts,
            size=Size(size.value),
            num_steps=steps,
            seed=settings.trainer.seed if seed is None else seed,
            console=Console(quiet=VERBOSITY.quiet),
        )
    )
    if config is None:
        print_hint(Console(), f"train it with: agent-loop train CONFIG model.path={out}")
