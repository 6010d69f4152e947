"""The same tasks through three doors, with tokens that the embedded engine samples from random weights."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.rollout.jobs import Job
from agent_loop.types import Origin
from tests.environments.test_three_doors import SEED, TEMPERATURE, rows_of_door
from tests.helpers import small_tokenizer
from tests.serve.harness import ProgramHarness
from tests.servers.tiny_embedded import serving, tiny_model

pytestmark = [pytest.mark.environments, pytest.mark.timeout(240)]

MAX_MODEL_LEN = 2048


def writer_of_digits() -> Any:
    """Return a model with random weights that samples digits alone, so that some answers hold the right number."""
    tokenizer = small_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=MAX_MODEL_LEN)
    is_digit = torch.tensor([tokenizer.decode([n]).isdecimal() for n in range(len(tokenizer))])
    with torch.no_grad():
        head = model.get_output_embeddings()
        bias = torch.where(is_digit, 0.0, -1e4)
        bias[tokenizer.eos_token_id] = -1.0
        head.bias = torch.nn.Parameter(bias)
    return model


async def play(rows: list[dict[str, Any]]) -> list[Any]:
    """Return the tokens, log-probs, reward and stop reason of every trajectory of a door."""
    eos_token_ids = [small_tokenizer().eos_token_id]
    settings = {"max_model_len": MAX_MODEL_LEN, "deterministic": True}
    async with serving(writer_of_digits(), eos_token_ids=eos_token_ids, **settings) as server:
        harness = ProgramHarness([server], prompt_length=512, response_length=1024)
        params = {"temperature": TEMPERATURE, "top_p": 0.9}
        jobs = [Job(row, group, 0, params, seed=SEED + group) for group, row in enumerate(rows)]
        trajectories = await harness.worker.run(jobs)
        harness.assert_nothing_is_left()
    played: list[Any] = []
    for trajectory in trajectories:
        assert trajectory.output.failure is None
        prompt, response = trajectory.output.segments
        assert (prompt.origin, response.origin) == (Origin.PROMPT, Origin.MODEL)
        assert response.logprobs is not None
        ids, logprobs = (prompt.token_ids.tolist(), response.token_ids.tolist()), response.logprobs.tolist()
        played.append((ids, logprobs, trajectory.reward, trajectory.output.stop_reason))
    return played


def test_an_engine_samples_the_same_tokens_and_gets_the_same_rewards_through_three_doors() -> None:
    by_rows, by_verifiers, by_program = [
        asyncio.run(play(rows_of_door(door))) for door in ("rows", "verifiers", "program")
    ]
    assert len({reward for _, _, reward, _ in by_rows}) > 1
    assert np.mean([len(ids[1]) for ids, _, _, _ in by_rows]) > 2
    assert by_verifiers == by_rows
    assert by_program == by_rows
