"""Tests that every family is exact: on the backend that the table of model types has for it, and in batches of
training."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agent_loop.config import ActorConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.model_types import can_share_prefixes
from agent_loop.training.actor import Actor
from agent_loop.types import IntArray, SamplingParams
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import FAMILIES, NOT_BUILT, VOCAB_SIZE, Family, each_family, token_ids
from tests.servers.tiny_embedded import (
    full_forward_logprobs,
    generate_all,
    joined,
    wait_until_decoded,
    weights_of,
)

TOLERANCE = 1e-3
"""Largest difference of log-probs in nats. A wrong window, state, position or padding exceeds it by far."""

# -- the models --------------------------------------------------------------------------------------------------------

LENGTH = 40
PARAMETERS = 3_000_000
"""Upper bound of the number of parameters of a tiny model."""


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def test_every_type_of_transformers_is_built_or_listed_with_the_reason() -> None:
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    missing = types - FAMILIES.keys() - NOT_BUILT.keys()
    assert not missing, f"add these types to the zoo: {sorted(missing)}"
    assert {family.model_type for family in FAMILIES.values()} | NOT_BUILT.keys() == types


@pytest.mark.nightly(keep=10)
@pytest.mark.slow
@each_family()
def test_a_family_builds_and_gives_distributions_that_are_neither_flat_nor_certain(family: Family) -> None:
    model = family.build()
    values = logits(model, token_ids(LENGTH))
    assert (values.dtype, tuple(values.shape)) == (torch.float32, (LENGTH, VOCAB_SIZE))
    assert values.isfinite().all()
    entropy = torch.distributions.Categorical(logits=values).entropy().mean()
    assert 0.3 < entropy < 4.4, f"the next-token distributions are flat or certain: entropy {entropy:.2f}"
    assert sum(parameter.numel() for parameter in model.parameters()) < PARAMETERS
    config = model.config.get_text_config()
    ids = [getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")]
    assert all(value is None or 0 <= value < VOCAB_SIZE for value in ids)


@pytest.mark.slow
def test_every_text_model_with_a_window_has_a_variant_with_a_short_window() -> None:
    plain = {name: family for name, family in FAMILIES.items() if name == family.model_type}
    windowed = {
        name for name, family in plain.items() if (getattr(family.config(), "sliding_window", 0) or 0) > 0
    }
    missing = {
        name for name in windowed if f"{name}-window" not in FAMILIES and f"{name}_text" not in FAMILIES
    }
    assert not missing, f"add these types to WINDOWED: {sorted(missing)}"


def has_comparable_limit(family: Family) -> bool:
    return bool(family.limits) and not (family.name.startswith("inkling") and family.name.endswith("-window"))


@pytest.mark.nightly(keep=10)
@pytest.mark.slow
@each_family(where=has_comparable_limit)
def test_a_limit_changes_the_logits_of_longer_sequences_only(family: Family) -> None:
    plain, varied = FAMILIES[family.model_type].build(), family.build()
    varied.load_state_dict(plain.state_dict())

    def difference(length: int) -> float:
        ids = token_ids(length)
        return float((logits(plain, ids) - logits(varied, ids)).abs().max())

    assert difference(LENGTH) > 1e-3
    assert difference(min(family.limits)) < 1e-4


# -- the embedded engine -----------------------------------------------------------------------------------------------

MAX_MODEL_LEN = 128
NOT_SUPPORTED = {
    *("cpmant", "musicgen", "musicgen_melody", "prophetnet", "xlm", "big_bird-sparse", "doge-sparse"),
    *("phi3-rope-longrope", "phimoe-rope-longrope", "qwen3-rope-longrope"),
    *("qwen3-rope-dynamic", "llama-rope-dynamic"),
}


@pytest.mark.nightly(keep=10)
@pytest.mark.slow
@each_family()
def test_a_family_is_served_exactly_or_is_not_supported(family: Family) -> None:
    model = family.build()
    config = EmbeddedConfig(max_model_len=MAX_MODEL_LEN, max_slots=8)
    try:
        server = EmbeddedServer(copy.deepcopy(model), name=family.name, config=config, eos_token_ids=())
    except ConfigError:
        assert family.name in NOT_SUPPORTED
        return
    assert family.name not in NOT_SUPPORTED

    async def check() -> None:
        try:
            for count in (1, 12):  # fewer and more than the slots
                await check_two_turns(server, model, prompts_of(family, count))
            await check_update(server, model, family)
        finally:
            await server.close()

    asyncio.run(check())


def prompts_of(family: Family, count: int) -> list[IntArray]:
    """Return prompts with lengths around the limits in random order, then prompts of random length."""
    rng = random.Random(count)
    lengths = [n for limit in family.limits for n in (limit - 2, limit, limit + 1, 2 * limit + 3)]
    rng.shuffle(lengths)
    lengths = [min(max(n, 1), MAX_MODEL_LEN - 20) for n in lengths] + [
        rng.randrange(1, 70) for _ in range(count)
    ]
    return [np.array(token_ids(n, seed=i), dtype=np.int32) for i, n in enumerate(lengths[:count])]


async def check_two_turns(server: EmbeddedServer, model: object, prompts: list[IntArray]) -> None:
    for turn in range(2):
        params = [SamplingParams(max_tokens=4, seed=100 * turn + i) for i in range(len(prompts))]
        outputs = await generate_all(server, prompts, params, prefix=f"{len(prompts)}-")
        for prompt, output in zip(prompts, outputs, strict=True):
            compare(model, prompt, output.token_ids, output.log_probs)
        prompts = [
            joined(prompt, output.token_ids, token_ids(3, seed=i))
            for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]


async def check_update(server: EmbeddedServer, model: object, family: Family) -> None:
    """Check that tokens before a weight update have log-probs of the old weights, and later completions of the new."""
    prompt, num_before = np.array(token_ids(12), dtype=np.int32), server.stats.decoded_tokens
    newer = family.build(seed=1)
    async with asyncio.TaskGroup() as group:
        completion = group.create_task(
            server.generate(prompt, SamplingParams(max_tokens=24, seed=5), "update")
        )
        await wait_until_decoded(server, num_before + 4)
        await server.update_weights(weights_of(newer).items(), weight_version=1)
    output = completion.result()
    assert [chunk.weight_version for chunk in output.chunks] == [0, 1]
    split = len(output.chunks[0].token_ids)
    compare(model, prompt, output.token_ids[:split], (output.log_probs or [])[:split])
    later = await server.generate(prompt, SamplingParams(max_tokens=4, seed=6), "later")
    compare(newer, prompt, later.token_ids, later.log_probs)


def compare(model: object, prompt: IntArray, token_ids: list[int], logprobs: list[float] | None) -> None:
    assert logprobs == pytest.approx(full_forward_logprobs(model, prompt, token_ids), abs=TOLERANCE)


# -- training batches --------------------------------------------------------------------------------------------------


@pytest.mark.nightly(keep=15)
@pytest.mark.slow
@pytest.mark.parametrize("share_prefixes", [False, True])
@each_family(where=lambda family: family.causal)
def test_logprobs_of_batched_rows_equal_those_of_single_rows(family: Family, share_prefixes: bool) -> None:
    model = family.build()
    if share_prefixes and not can_share_prefixes(model):
        pytest.skip("not proved")
    batch = ragged_batch(limits=family.limits)
    actor = Actor(model, config=ActorConfig(share_prefixes=share_prefixes))
    check_logprobs(actor.logprobs(batch), model, batch, tolerance=TOLERANCE)
