"""Generator of the scenarios' conversations, from a seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from agent_loop.tools.signature import function_schema
from overhead.shapes import SHAPES, TAIL_TOKENS, Conversation, Shape, Turn, Workload
from overhead.tokenizer import make_tokenizer, prose
from overhead.tools import TOOLS

SYSTEM = "You answer questions about the reference. Look things up before you answer, and say where you found them."
REPLY = (
    "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
"""Text of the template after a completion with a call. The completion includes the first token."""
MODEL_CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
"""Configuration of a model that is never loaded, for sides that need a model folder."""


def make_workloads(
    folder: Path,
    *,
    shapes: Sequence[Shape] = SHAPES,
    variants: Mapping[str, Sequence[Shape]] = MappingProxyType({}),
    seed: int = 0,
) -> None:
    """Write a tokenizer and one file for each scenario.

    Args:
        folder: Folder of the files.
        shapes: The scenarios.
        variants: Shapes of the single conversations, by scenario. By default they all have the scenario's shape.
        seed: Seed of the texts.
    """
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(MODEL_CONFIG))
    writer = _Writer(tokenizer.backend_tokenizer, seed=seed)
    for shape in shapes:
        schemas = [function_schema(function) for function in TOOLS] if shape.has_tools else []
        conversations = [
            _conversation(f"{shape.name} {number}", variant, schemas, tokenizer=tokenizer, writer=writer)
            for number, variant in enumerate(variants.get(shape.name, [shape] * shape.num_conversations))
        ]
        Workload(shape, conversations, schemas).write(folder)


class _Writer:
    """Generator of texts with a given number of tokens."""

    def __init__(self, backend: Tokenizer, *, seed: int) -> None:
        self.random = random.Random(seed)
        self._backend = backend
        self._words = re.findall(r"[A-Za-z]{2,}", prose())

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def ids_of(self, around: Callable[[str], str], num_tokens: int) -> tuple[str, list[int]]:
        """Return consecutive words `text`, and the ids of `around(text)`, which has exactly `num_tokens` tokens."""
        start = self.random.randrange(len(self._words) - 2 * num_tokens)
        words = ["The", *self._words[start : start + num_tokens]]
        while len(ids := self.encode(around(" ".join(words)))) > num_tokens:
            del words[-max(1, (len(ids) - num_tokens) // 2) :]
        words += ["a"] * (num_tokens - len(ids))
        text = " ".join(words)
        ids = self.encode(around(text))
        assert len(ids) == num_tokens, (len(ids), num_tokens)
        return text, ids


def _conversation(
    name: str, shape: Shape, schemas: Sequence[dict[str, Any]], *, tokenizer: Any, writer: _Writer
) -> Conversation:
    def messages(words: str) -> list[dict[str, Any]]:
        question = f"{words}. This is question {name}."
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]

    def prompt(words: str) -> str:
        return tokenizer.apply_chat_template(
            messages(words), tools=schemas or None, tokenize=False, add_generation_prompt=True
        )

    words, context = writer.ids_of(prompt, shape.prompt_tokens)
    turns: list[Turn] = []
    replies: dict[str, str] = {}
    for number in range(shape.num_turns):
        query = f"{name}, {number}"
        is_last = number + 1 == shape.num_turns
        turn = _turn(context, None if is_last else query, shape, writer=writer)
        turns.append(turn)
        if not is_last:
            text, ids = writer.ids_of(
                lambda words, query=query: REPLY.format(f"{words} ({query})"), shape.reply_tokens + 1
            )
            replies[query] = f"{text} ({query})"
            context = [*context, *turn.token_ids, *ids[1:]]
    return Conversation(messages(words), turns, replies)


def _turn(context: list[int], query: str | None, shape: Shape, *, writer: _Writer) -> Turn:
    call = ""
    if query is not None:
        arguments = {"name": "search", "arguments": {"query": query, "max_results": 3}}
        call = f"\n<tool_call>\n{json.dumps(arguments)}\n</tool_call>"
    _, ids = writer.ids_of(lambda words: f"{words}{call}<|im_end|>", shape.turn_tokens)
    logprobs = [-writer.random.random() for _ in ids]
    return Turn(tuple(context[-TAIL_TOKENS:]), ids, logprobs)
