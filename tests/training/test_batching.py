"""Rows are batched for training only in ways that do not change the outputs of any row."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from agent_loop.config import ActorConfig
from agent_loop.training.actor import Actor
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import FAMILIES


class OwnModel(LlamaForCausalLM):
    """Model of a known type whose forward is not that of `transformers`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs


@pytest.mark.parametrize("name", ["rwkv", "llama4_text-temperature", "own"])
def test_a_model_that_padding_may_change_is_trained_one_row_at_a_time(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = FAMILIES["llama" if name == "own" else name]
    model: Any = OwnModel(family.config()).eval() if name == "own" else family.build()
    actor = Actor(model, config=ActorConfig(max_tokens_per_micro_batch=10_000))
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("agent_loop.")]
    assert message.startswith(f"{type(model).__name__} is of a type")
    batch = ragged_batch(limits=family.limits)
    check_logprobs(actor.logprobs(batch), model, batch)
