"""Supervised training on demonstrations, on the tokens that the assistant says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from agent_loop.types import Message
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.common.tokenizer import render

IGNORED = -100
"""Label of tokens that carry no loss."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens."""

    token_ids: list[int]
    labels: list[int]
    """The token itself where the assistant says it, else `IGNORED`."""


def warm_start(
    model: Qwen3ForCausalLM,
    *,
    tokenizer: PreTrainedTokenizerFast,
    conversations: Iterator[Sequence[Message]],
    tools: Sequence[dict[str, Any]],
    num_steps: int,
    batch_size: int = 16,
    lr: float = 2e-3,
    seed: int = 0,
) -> Iterator[tuple[int, float]]:
    """Trains in place; yields the step and its loss after each step."""
    encoder = Encoder(tokenizer, tools=tools)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model.train()
    for step in range(1, num_steps + 1):
        examples = [encoder.encode(messages) for messages in islice(conversations, batch_size)]
        loss = _loss(model, examples, pad_id=encoder.pad_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step, loss.item()
    model.eval()


class Encoder:
    """Turns a conversation into tokens and labels."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        self._end_id: int = tokenizer.eos_token_id
        self.pad_id: int = tokenizer.pad_token_id

    def encode(self, messages: Sequence[Message]) -> Example:
        """The whole conversation at once. What a model said is what follows the opening of an assistant turn, up to
        and with the end token."""
        text = render(self._tokenizer, messages, tools=self._tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        labels = [IGNORED] * len(ids)
        width = len(self._opening)
        for start in range(width, len(ids)):
            if ids[start - width : start] == self._opening:
                stop = ids.index(self._end_id, start) + 1
                labels[start:stop] = ids[start:stop]
        return Example(ids, labels)


def _loss(model: Qwen3ForCausalLM, examples: Sequence[Example], *, pad_id: int) -> torch.Tensor:
    length = max(len(example.token_ids) for example in examples)
    ids_BT = torch.full((len(examples), length), pad_id)
    labels_BT = torch.full((len(examples), length), IGNORED)
    for row, example in enumerate(examples):
        ids_BT[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        labels_BT[row, : len(example.labels)] = torch.tensor(example.labels)
    logits_BTV = model(input_ids=ids_BT[:, :-1]).logits
    return torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
    )
