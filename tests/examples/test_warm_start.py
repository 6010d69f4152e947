from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from agent_loop.tiny_models.model import make_model
from agent_loop.tiny_models.tokenizer import pad_id, render
from examples.common.demonstrations import demonstrations
from examples.common.warm_start import BATCH_SIZE, IGNORED, encode, warm_start
from tests.examples.conftest import Example


def test_only_the_assistant_s_tokens_have_labels(example: Example) -> None:
    row = example.task.train_rows(count=1)[0]
    messages = row["prompt"] + example.task.solution(row)
    encoded = next(encode(iter([messages]), tokenizer=example.tokenizer, tools=example.schemas))
    learnt = example.tokenizer.decode([label for label in encoded.labels if label != IGNORED])
    turns = [turn for turn in example.task.solution(row) if turn["role"] == "assistant"]
    rendered = (render(example.tokenizer, [turn], tools=[]) for turn in turns)
    assert learnt == "".join(
        text.removeprefix("<|im_start|>assistant\n").removesuffix("\n") for text in rendered
    )
    assert all(
        label in (token, IGNORED) for token, label in zip(encoded.token_ids, encoded.labels, strict=True)
    )


def test_packing_conversations_into_rows_does_not_change_the_loss(example: Example) -> None:
    torch.set_num_threads(1)
    conversations = demonstrations(example.task, rng=random.Random(3), habit=example.recipe.habit)
    batch = list(
        islice(encode(conversations, tokenizer=example.tokenizer, tools=example.schemas), BATCH_SIZE)
    )
    model = make_model(example.tokenizer, seed=0)
    losses: list[torch.Tensor] = []
    for encoded in batch:
        logits_TV = model(input_ids=torch.tensor([encoded.token_ids])).logits[0, :-1]
        targets_T = torch.tensor(encoded.labels[1:])
        losses.append(
            torch.nn.functional.cross_entropy(logits_TV, targets_T, ignore_index=IGNORED, reduction="sum")
        )
    num_learnt = sum(label != IGNORED for encoded in batch for label in encoded.labels)
    packed = next(warm_start(model, examples=iter(batch), pad_id=pad_id(example.tokenizer), num_steps=1))
    assert packed == pytest.approx(torch.stack(losses).sum().item() / num_learnt, rel=1e-5)
