"""A tiny model with its tokenizer, as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from agent_loop.tiny_models.model import make_model
from agent_loop.tiny_models.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    chats = [
        [
            {"role": "user", "content": f"What is {n} plus 1?"},
            {"role": "assistant", "content": f"It is {n + 1}."},
        ]
        for n in range(20)
    ]
    tokenizer = train_tokenizer(chats, tools=[])
    for each in cast("list[Any]", [make_model(tokenizer, seed=3), tokenizer]):
        each.save_pretrained(folder)
    return folder
