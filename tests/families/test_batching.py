"""Every family in every way of batching: refused by name, or exact."""

from __future__ import annotations

import pytest

from agent_loop.config import ActorConfig
from agent_loop.errors import ConfigError
from agent_loop.training.actor import Actor
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import Family, each_family

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
"""In nats; models that magnify rounding stay below it, and padding or another row moves log-probs by far more."""


@pytest.mark.parametrize("way", ["padding", "use_packing", "share_prefixes"])
@each_family(where=lambda family: family.causal)
def test_logprobs_of_batched_rows_are_those_of_rows_alone(family: Family, way: str) -> None:
    config = ActorConfig() if way == "padding" else ActorConfig.model_validate({way: True})
    model = family.build()
    try:
        actor = Actor(model, config=config, max_row_tokens=128)
    except ConfigError:
        assert way != "padding"  # such models are trained one row at a time
        return
    batch = ragged_batch(limits=family.limits)
    check_logprobs(actor.logprobs(batch), model, batch, tolerance=TOLERANCE)
