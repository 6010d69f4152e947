"""Rows are batched for training only in ways that do not change the outputs of any row."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from agent_loop.config import ActorConfig
from agent_loop.errors import ConfigError
from agent_loop.training.actor import Actor
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import FAMILIES

SHARED = {"share_prefixes": True}


class OwnModel(LlamaForCausalLM):
    """Model of a known type whose forward is not that of `transformers`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs


@pytest.mark.parametrize(
    ("name", "settings", "fault"),
    [
        ("gpt_neo-window", SHARED, ".*GPTNeoForCausalLM has an attention that cannot be exchanged"),
        ("mamba", SHARED, r".*state runs from token to token.*set actor\.share_prefixes=false"),
        ("phimoe-window", SHARED, "share_prefixes is on"),
    ],
)
def test_batching_that_is_not_proved_for_the_type_is_refused(
    name: str, settings: dict[str, bool], fault: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^actor\.{fault}"):
        Actor(FAMILIES[name].build(), config=ActorConfig(**settings))


@pytest.mark.parametrize("name", ["rwkv", "llama4_text-temperature", "own"])
def test_a_model_that_padding_may_change_is_trained_one_row_at_a_time(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = FAMILIES["llama" if name == "own" else name]
    model: Any = OwnModel(family.config()).eval() if name == "own" else family.build()
    actor = Actor(model, config=ActorConfig(max_tokens_per_micro_batch=10_000))
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("agent_loop.")]
    assert message.startswith("actor: each row is computed in a forward of its own, which is slower")
    batch = ragged_batch(limits=family.limits)
    check_logprobs(actor.logprobs(batch), model, batch)
