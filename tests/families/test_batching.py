"""Tests that each way of batching is exact for every family that the table of model types has for it."""

from __future__ import annotations

import pytest

from agent_loop.config import ActorConfig
from agent_loop.servers.embedded.model_types import can_share_prefixes
from agent_loop.training.actor import Actor
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import Family, each_family

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
"""Largest difference of log-probs in nats. Rounding stays below it; wrong padding exceeds it by far."""


@pytest.mark.nightly(keep=15)
@pytest.mark.parametrize("share_prefixes", [False, True])
@each_family(where=lambda family: family.causal)
def test_logprobs_of_batched_rows_equal_those_of_single_rows(family: Family, share_prefixes: bool) -> None:
    model = family.build()
    if share_prefixes and not can_share_prefixes(model):
        pytest.skip("not proved")
    actor = Actor(model, config=ActorConfig(share_prefixes=share_prefixes))
    batch = ragged_batch(limits=family.limits)
    check_logprobs(actor.logprobs(batch), model, batch, tolerance=TOLERANCE)
