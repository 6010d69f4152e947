"""Supervised training on demonstrations, on the tokens of the assistant."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from agent_loop.tiny_models.model import make_model
from agent_loop.tiny_models.tokenizer import end_id, pad_id, render, train_tokenizer
from agent_loop.types import Message
from examples.common.demonstrations import Habit, Task, demonstrations

IGNORED = -100
"""Label of tokens that carry no loss."""
BATCH_SIZE = 16
"""Conversations per step."""
PEAK_LR = 2e-3
WARMUP_STEPS = 30


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of a conversation."""

    token_ids: list[int]
    labels: list[int]
    """The token ids of the assistant's tokens, and `IGNORED` for all other tokens."""


def make_warm_model(
    path: Path,
    *,
    task: Task,
    tools: Sequence[dict[str, Any]],
    habit: Habit,
    num_steps: int,
    num_conversations: int = 2000,
) -> None:
    """Create a model and its tokenizer, train it on demonstrations with a bad habit, and write both to a folder.

    The result is the same on every call.

    Args:
        path: The folder.
        task: The task of the demonstrations.
        tools: The tool schemas in the prompts.
        habit: How often the demonstrations are right.
        num_steps: Number of training steps.
        num_conversations: Number of conversations that train the tokenizer.
    """
    conversations = demonstrations(task, rng=random.Random(0), habit=habit)
    tokenizer = train_tokenizer(islice(conversations, num_conversations), tools=tools)
    model = make_model(tokenizer, seed=0)
    examples = encode(conversations, tokenizer=tokenizer, tools=tools)
    for _ in warm_start(model, examples=examples, pad_id=pad_id(tokenizer), num_steps=num_steps):
        pass
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def warm_start(
    model: Qwen3ForCausalLM,
    *,
    examples: Iterator[Example],
    pad_id: int,
    num_steps: int,
) -> Iterator[float]:
    """Train the model in place, and yield the loss after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_share(step, num_steps=num_steps))
    model.train()
    for _ in range(num_steps):
        loss = _loss(model, list(islice(examples, BATCH_SIZE)), pad_id=pad_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()
    model.eval()


def encode(
    conversations: Iterator[Sequence[Message]],
    *,
    tokenizer: PreTrainedTokenizerFast,
    tools: Sequence[dict[str, Any]],
) -> Iterator[Example]:
    """Yield the tokens and labels of each conversation.

    The assistant's tokens are those after the opening of its turn, up to the end token, which is included.
    """
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    for messages in conversations:
        text = render(tokenizer, messages, tools=tools)
        ids = tokenizer.encode(text, add_special_tokens=False)
        labels = [IGNORED] * len(ids)
        for start in range(len(opening), len(ids)):
            if ids[start - len(opening) : start] == opening:
                stop = ids.index(end_id(tokenizer), start) + 1
                labels[start:stop] = ids[start:stop]
        yield Example(ids, labels)


def _lr_share(step: int, *, num_steps: int) -> float:
    """Return the learning rate as a share of its peak: a linear warmup, and a linear decay over the second half.

    The decay makes copying reliable.
    """
    return min(1.0, (step + 1) / WARMUP_STEPS, 2.0 * (num_steps - step) / num_steps)


def _loss(model: Qwen3ForCausalLM, examples: Sequence[Example], *, pad_id: int) -> Tensor:
    """Return the mean loss over the assistant's tokens.

    Short conversations share a row and cannot attend to each other. Most demonstrations give up in the first turn, so
    that padding each of them to the longest would double the computation.
    """
    length = max(len(example.token_ids) for example in examples)
    rows = _fit_into_rows(examples, length=length)
    ids_BT = torch.full((len(rows), length), pad_id)
    targets_BT = torch.full((len(rows), length), IGNORED)
    positions_BT = torch.zeros((len(rows), length), dtype=torch.long)
    owner_BT = torch.full((len(rows), length), -1)
    for row, members in enumerate(rows):
        start = 0
        for owner, example in enumerate(members):
            columns = slice(start, start + len(example.token_ids))
            ids_BT[row, columns] = torch.tensor(example.token_ids)
            targets_BT[row, columns] = torch.tensor([*example.labels[1:], IGNORED])
            positions_BT[row, columns] = torch.arange(len(example.token_ids))
            owner_BT[row, columns] = owner
            start = columns.stop
    mask_BTT = (owner_BT[:, :, None] == owner_BT[:, None, :]).tril()
    hidden_BTD = model.model(
        input_ids=ids_BT, position_ids=positions_BT, attention_mask=mask_BTT[:, None]
    ).last_hidden_state
    is_target_BT = targets_BT != IGNORED
    return torch.nn.functional.cross_entropy(
        model.lm_head(hidden_BTD[is_target_BT]), targets_BT[is_target_BT]
    )


def _fit_into_rows(examples: Sequence[Example], *, length: int) -> list[list[Example]]:
    """Assign examples to rows, longest first, each to the first row with enough room."""
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: len(example.token_ids), reverse=True):
        size = len(example.token_ids)
        row = next((index for index, free in enumerate(room) if free >= size), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(example)
        room[row] -= size
    return rows
