"""Tests of the server side of a weight update, with the files of a real model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_loop.config import ModelConfig, WeightTransfer
from agent_loop.errors import ConfigError, WeightsError
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.weights.adapted import AdaptedWeights, Factors
from agent_loop.weights.handle import WeightHandle
from agent_loop.weights.receiver import WeightReceiver
from tests.training.fakes import tiny_policy
from tests.weights.receiving import blocks, flat

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def base() -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in tiny_policy().named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(folder)
    return folder


def adapted_of(base: dict[str, Tensor], *, seed: int = 0) -> AdaptedWeights:
    generator = torch.Generator().manual_seed(seed)
    factors = {
        name: Factors(
            torch.randn(weight.shape[0], 2, generator=generator),
            torch.randn(2, weight.shape[1], generator=generator),
        )
        for name, weight in base.items()
        if name.endswith("_proj.weight")
    }
    return AdaptedWeights(base, base_id="base", factors=factors)


def publisher_of(folder: Path, *, transfer: WeightTransfer = "auto", **options: bool) -> WeightPublisher:
    return WeightPublisher(
        ModelConfig(path=str(folder)), transfer=transfer, is_same_host=True, num_receivers=1, **options
    )


async def publish(
    publisher: WeightPublisher, weights: AdaptedWeights, *, receiver: WeightReceiver
) -> tuple[WeightHandle, dict[str, Tensor]]:
    async with publisher.offer(weights, weight_version=1) as handle:
        return handle, {name: tensor.clone() for name, tensor in receiver.receive(handle)}


async def test_an_update_with_adapters_is_checked_against_the_model_and_the_adapters_are_sent_alone(
    folder: Path, base: dict[str, Tensor]
) -> None:
    publisher, receiver = publisher_of(folder), WeightReceiver()
    for seed in range(2):
        weights = adapted_of(base, seed=seed)
        handle, received = await publish(publisher, weights, receiver=receiver)
        assert handle.base is not None
        assert flat(received.items()) == flat(weights)
    publisher.close()
    assert not blocks()


async def test_names_that_the_model_lacks_are_refused_before_weights_are_sent(
    folder: Path, base: dict[str, Tensor]
) -> None:
    publisher = publisher_of(folder)
    unknown = {**base, "model.layers.9.mlp.down_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(WeightsError, match=r"the model has no weight 'model\.layers\.9"):
        await publish(publisher, adapted_of(unknown), receiver=WeightReceiver())
    missing = dict(list(base.items())[:-1])
    with pytest.raises(WeightsError, match=r"1 of the model's .* weights are missing"):
        await publish(publisher, adapted_of(missing), receiver=WeightReceiver())
    assert not blocks()


async def test_a_tied_weight_published_under_its_other_name_is_sent_merged_under_the_name_that_engines_load(
    tmp_path: Path, base: dict[str, Tensor]
) -> None:
    tied = tiny_policy()
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path)
    assert EMBEDDING in base
    named = {(HEAD if name == EMBEDDING else name): weight for name, weight in base.items() if name != HEAD}
    weights = adapted_of(named)

    publisher = publisher_of(tmp_path)
    handle, received = await publish(publisher, weights, receiver=WeightReceiver())
    assert handle.base is None
    merged = dict(weights)
    merged[EMBEDDING] = merged.pop(HEAD)
    assert received.keys() == merged.keys()
    assert all(torch.equal(received[name], weight) for name, weight in merged.items())
    both = {**named, EMBEDDING: named[HEAD] + 1}
    with pytest.raises(WeightsError, match="are tied in this model"):
        await publish(publisher, adapted_of(both), receiver=WeightReceiver())
    publisher.close()


@pytest.mark.parametrize("as_checkpoints", [True, False])
async def test_only_engines_that_load_files_themselves_get_complete_checkpoints(
    folder: Path, base: dict[str, Tensor], as_checkpoints: bool
) -> None:
    publisher = publisher_of(folder, transfer="disk", as_checkpoints=as_checkpoints)
    async with publisher.offer(adapted_of(base), weight_version=1) as handle:
        assert (handle.base is None) is as_checkpoints
        assert ("config.json" in os.listdir(handle.source["folder"])) is as_checkpoints
        assert flat(WeightReceiver().receive(handle)) == flat(adapted_of(base))
    publisher.close()


@pytest.mark.parametrize(
    ("path", "transfer", "error", "message"),
    [
        (None, "cuda_ipc", ConfigError, "the weights are not on a GPU"),
        ("no/such-model", "auto", WeightsError, "not on this machine"),
    ],
)
async def test_weights_that_cannot_be_sent_are_refused(
    folder: Path, base: dict[str, Tensor], path: str | None, transfer: Any, error: Any, message: str
) -> None:
    publisher = publisher_of(folder if path is None else Path(path), transfer=transfer)
    with pytest.raises(error, match=message):
        await publish(publisher, adapted_of(base), receiver=WeightReceiver())
