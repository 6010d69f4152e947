"""Tests of weight updates of the embedded server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from agent_loop.errors import WeightsError
from tests.servers.tiny_embedded import (
    GREEDY,
    LONG,
    full_forward_logprobs,
    joined,
    random_prompt,
    serving,
    tiny_model,
    wait_until_decoded,
    weights_of,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def flat_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return weights with which all tokens are equally likely."""
    weights = weights_of(model)
    weights["model.norm.weight"].zero_()
    return weights


async def test_no_cache_of_old_weights_is_reused(model: Any) -> None:
    other = tiny_model(seed=1)

    async with serving(model) as server, asyncio.TaskGroup() as group:
        idle, busy = random_prompt(40), random_prompt(40, seed=1)
        draft = await server.generate(idle, GREEDY, "idle")
        running = group.create_task(server.generate(busy, LONG, "busy"))
        await wait_until_decoded(server, 25)
        await server.update_weights(weights_of(other).items(), weight_version=1)
        beside = group.create_task(server.generate(busy, GREEDY, "beside"))
        prompts = [joined(idle, draft.token_ids, [5]), busy, joined(busy, (await running).token_ids, [5])]
        outputs = [
            await server.generate(prompts[0], GREEDY, "idle"),
            await beside,
            await server.generate(prompts[2], GREEDY, "busy"),
        ]
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = full_forward_logprobs(other, prompt, output.token_ids)
            assert output.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.norm.wait": torch.zeros(64)},
            "no weight 'model.norm.wait'; did you mean 'model.norm.weight'",
        ),
        ({"model.norm.weight": torch.zeros(65)}, r"shape \(65,\), but the model's is \(64,\)"),
        ({"model.norm.weight": None}, "weights are missing, 'model.norm.weight' first"),
        ({"model.norm.weight": torch.zeros(64, device="meta")}, "holds no data"),
        ({"model.norm.weight": 3}, "is a int; give a torch.Tensor"),
    ],
)
async def test_weights_that_do_not_fit_change_nothing(
    model: Any, change: dict[str, Any], message: str
) -> None:
    weights = {**flat_weights(model), **change}
    published = {name: weight for name, weight in weights.items() if weight is not None}

    async with serving(model) as server:
        before = await server.generate(random_prompt(9), GREEDY, "a")
        with pytest.raises(WeightsError, match=message):
            await server.update_weights(published.items(), weight_version=1)
        again = await server.generate(random_prompt(9), GREEDY, "b")
        assert again == before
        assert (await server.health()).weight_version == 0


async def test_one_of_two_tied_weights_is_enough_and_both_must_be_equal() -> None:
    tied, other = tiny_model(tie_word_embeddings=True), tiny_model(tie_word_embeddings=True, seed=1)

    async with serving(tied) as server:
        weights = weights_of(other)
        assert "lm_head.weight" in weights
        await server.update_weights(weights.items(), weight_version=1)
        both = await server.generate(random_prompt(9), GREEDY, "a")
        del weights["lm_head.weight"]
        await server.update_weights(weights.items(), weight_version=2)
        one = await server.generate(random_prompt(9), GREEDY, "b")
        assert both.token_ids == one.token_ids
        expected = full_forward_logprobs(other, random_prompt(9), one.token_ids)
        assert one.log_probs == pytest.approx(expected, abs=1e-4)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        with pytest.raises(WeightsError, match="published with different values"):
            await server.update_weights(weights.items(), weight_version=3)
