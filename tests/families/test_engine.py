"""Tests that every family is exact on the backend that the table of model types has for it, or is not supported."""

from __future__ import annotations

import asyncio
import copy
import random

import numpy as np
import pytest

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.types import IntArray, SamplingParams, TokenOutput
from tests.families.zoo import Family, each_family, token_ids
from tests.servers.tiny_embedded import (
    full_forward_logprobs,
    generate_all,
    joined,
    wait_until_decoded,
    weights_of,
)

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 128
TOLERANCE = 1e-3
"""Largest difference of log-probs in nats. A wrong window, state or position exceeds it by far."""
NOT_SUPPORTED = {
    *("cpmant", "musicgen", "musicgen_melody", "prophetnet", "xlm", "big_bird-sparse", "doge-sparse"),
    *("phi3-rope-longrope", "phimoe-rope-longrope", "qwen3-rope-longrope"),
    *("qwen3-rope-dynamic", "llama-rope-dynamic"),
}


@pytest.mark.nightly(keep=10)
@each_family()
def test_a_family_is_served_exactly(family: Family) -> None:
    name = family.name
    model = family.build()
    try:
        server = EmbeddedServer(
            copy.deepcopy(model),
            name=name,
            config=EmbeddedConfig(max_model_len=MAX_MODEL_LEN, max_slots=8),
            eos_token_ids=(),
        )
    except ConfigError:
        assert name in NOT_SUPPORTED
        return
    assert name not in NOT_SUPPORTED
    asyncio.run(_check(server, model, family))


async def _check(server: EmbeddedServer, model: object, family: Family) -> None:
    try:
        for count in (1, 12):  # fewer and more than the slots
            await _check_two_turns(server, model, _prompts(family, count))
        await _check_update(server, model, family)
    finally:
        await server.close()


def _prompts(family: Family, count: int) -> list[IntArray]:
    """Return prompts with lengths around the limits in random order, then prompts of random length."""
    rng = random.Random(count)
    lengths = [n for limit in family.limits for n in (limit - 2, limit, limit + 1, 2 * limit + 3)]
    rng.shuffle(lengths)
    lengths = [min(max(n, 1), MAX_MODEL_LEN - 20) for n in lengths] + [
        rng.randrange(1, 70) for _ in range(count)
    ]
    return [np.array(token_ids(n, seed=i), dtype=np.int32) for i, n in enumerate(lengths[:count])]


async def _check_two_turns(server: EmbeddedServer, model: object, prompts: list[IntArray]) -> None:
    prefix = f"{len(prompts)}-"
    for turn in range(2):
        params = [SamplingParams(max_tokens=4, seed=100 * turn + i) for i in range(len(prompts))]
        outputs = await generate_all(server, prompts, params, prefix=prefix)
        for prompt, output in zip(prompts, outputs, strict=True):
            _compare(model, prompt, output.token_ids, output.log_probs)
        prompts = [
            joined(prompt, output.token_ids, token_ids(3, seed=i))
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]


async def _check_update(server: EmbeddedServer, model: object, family: Family) -> None:
    """Check that tokens before a weight update have log-probs of the old weights, and later completions of the new."""
    prompt, num_before = np.array(token_ids(12), dtype=np.int32), server.stats.decoded_tokens
    newer = family.build(seed=1)
    async with asyncio.TaskGroup() as group:
        completion = group.create_task(
            server.generate(prompt, SamplingParams(max_tokens=24, seed=5), "update")
        )
        await wait_until_decoded(server, num_before + 4)
        await server.update_weights(weights_of(newer).items(), weight_version=1)
    output: TokenOutput = completion.result()
    assert [chunk.weight_version for chunk in output.chunks] == [0, 1]
    split = len(output.chunks[0].token_ids)
    _compare(model, prompt, output.token_ids[:split], output.log_probs[:split])
    later = await server.generate(prompt, SamplingParams(max_tokens=4, seed=6), "later")
    _compare(newer, prompt, later.token_ids, later.log_probs)


def _compare(model: object, prompt: IntArray, token_ids: list[int], logprobs: list[float]) -> None:
    assert logprobs == pytest.approx(full_forward_logprobs(model, prompt, token_ids), abs=TOLERANCE)
