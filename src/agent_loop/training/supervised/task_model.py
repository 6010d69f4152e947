"""A model from nothing for one task: tokenizer, random weights, and supervised training on demonstrations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from agent_loop.config import Config
from agent_loop.errors import DataError
from agent_loop.files.file_kinds import refuse_existing
from agent_loop.rollout.rows import load_rows
from agent_loop.tiny_models.model import Size, make_model
from agent_loop.tiny_models.tokenizer import train_tokenizer
from agent_loop.training.checkpoint import latest_checkpoint
from agent_loop.training.progress import without_progress_of_transformers
from agent_loop.training.supervised.trainer import SupervisedTrainer
from agent_loop.types import Message, Row

NUM_TEXTS = 4000
"""Largest number of conversations from which a tokenizer learns."""
PEAK_LR = {Size.TINY: 2e-3, Size.SMALL: 1e-3}
WARMUP_STEPS = 30


@dataclass(frozen=True, slots=True)
class TaskTexts:
    """Texts of a task, from which its model is made."""

    prompts: Sequence[Row]
    """Rows with `raw_prompt`."""
    demonstrations: Sequence[Row]
    """Rows with a complete conversation in `raw_prompt`, and optionally with `tools`."""
    tools: Sequence[dict[str, Any]]
    """Schemas of the tools in all prompts, and in conversations without `tools`."""

    @classmethod
    def load(
        cls,
        rows: Sequence[str],
        demonstrations: Sequence[str],
        *,
        prompt_key: str,
        messages_key: str,
        tools: Sequence[dict[str, Any]],
    ) -> TaskTexts:
        """Load rows and demonstrations from sources such as `rows.jsonl` or `task.py:train_rows`.

        Without tools, those of the first demonstration that has some are used.
        """
        chats = load_rows(demonstrations, prompt_key=messages_key) if demonstrations else []
        no_tools: Sequence[dict[str, Any]] = []
        shown = next((row["tools"] for row in chats if row.get("tools")), no_tools)
        return cls(load_rows(rows, prompt_key=prompt_key), chats, tools=tools or shown)


async def make_task_model(
    out: Path, texts: TaskTexts, *, size: Size, num_steps: int, seed: int, console: Console
) -> None:
    """Make a tokenizer and a model for a task, and write both to a folder in the format of `transformers`.

    The tokenizer learns the phrases of the task. Without demonstrations, the weights stay random.
    """
    refuse_existing(out)
    rows = [*texts.demonstrations, *texts.prompts][:NUM_TEXTS]
    conversations: list[Sequence[Message]] = [row["raw_prompt"] for row in rows]
    try:
        tokenizer = train_tokenizer(conversations, tools=texts.tools, vocab_size=size.vocabulary)
    except TypeError as error:  # a message whose content is not text
        raise DataError(f"a prompt or a demonstration cannot be written as text ({error})") from error
    model = make_model(tokenizer, seed=seed, size=size)
    with without_progress_of_transformers():
        for each in cast("list[Any]", [model, tokenizer]):
            each.save_pretrained(out)
    console.print(
        f"{out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens",
        highlight=False,
        markup=False,
    )
    if texts.demonstrations and num_steps:
        with tempfile.TemporaryDirectory() as folder:
            config = _supervised_config(
                out, texts, folder=Path(folder), size=size, num_steps=num_steps, seed=seed
            )
            result = await SupervisedTrainer(config, console=console).fit()
            trained = latest_checkpoint(result.run_dir).model_path
            for file in trained.glob("*.safetensors"):
                (out / file.name).write_bytes(file.read_bytes())


def _supervised_config(
    model: Path, texts: TaskTexts, *, folder: Path, size: Size, num_steps: int, seed: int
) -> Config:
    chats = folder / "demonstrations.jsonl"
    with chats.open("w", encoding="utf-8") as file:
        for row in texts.demonstrations:
            shown = {"messages": row["raw_prompt"], "tools": row.get("tools") or list(texts.tools)}
            file.write(json.dumps(shown) + "\n")
    values = {
        "model": {"path": str(model), "device": "cpu"},
        "sft": {"files": [str(chats)]},
        "data": {"seed": seed},
        "actor": {
            "lr": PEAK_LR[size],
            "warmup_steps": WARMUP_STEPS,
            "decay_steps": num_steps,
        },
        "trainer": {"total_steps": num_steps, "run_dir": str(folder / "run"), "seed": seed},
    }
    return Config.model_validate(values)
