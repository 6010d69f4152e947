"""Weights of models with adapters in a real object store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_loop.distributed.weights import PublishedWeights, WeightFetcher, WeightStore
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.shared import SharedWeights
from tests.distributed.cluster import cluster_of, ray
from tests.weights.adapting import adapted_of, base_weights
from tests.weights.receiving import PlainTensor, flat

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


class Fetching:
    """Actor that fetches published weights as a server's actor does."""

    def __init__(self) -> None:
        self._fetcher = WeightFetcher()
        self._bases: list[Any] = []

    async def fetch(self, published: PublishedWeights) -> tuple[str, list[PlainTensor], int]:
        """Return the id of the base, the merged weights, and the number of bases fetched so far."""
        weights = await self._fetcher.fetch(published)
        assert isinstance(weights, AdaptedWeights)
        if not any(base is weights.base for base in self._bases):
            self._bases.append(weights.base)
        return weights.base_id, flat(weights), len(self._bases)


def num_bytes(published: PublishedWeights) -> int:
    return sum(spec.num_bytes for spec in published.tensors)


def test_the_base_is_stored_once_and_a_restarted_actor_gets_it_too() -> None:
    async def main() -> None:
        store, actor = WeightStore(), ray.remote(Fetching).remote()
        references = set[Any]()
        base = base_weights()
        for version in (1, 2):
            weights = adapted_of(base, version=version)
            async with SharedWeights(weights) as shared:
                published = await store.publish(shared, weight_version=version)
            assert published.base is not None
            assert num_bytes(published) * 20 < num_bytes(published.base)
            references |= set(published.base.buckets)
            assert await actor.fetch.remote(published) == ("first", flat(weights), 1)
        assert len(references) == 1
        assert await ray.remote(Fetching).remote().fetch.remote(published) == ("first", flat(weights), 1)
        other = adapted_of(base_weights(1), version=3, base_id="second")
        published = await store.publish(other, weight_version=3)
        assert await actor.fetch.remote(published) == ("second", flat(other), 2)
        assert set(published.base.buckets).isdisjoint(references)
        plain = await store.publish(base.items(), weight_version=4)
        assert plain.base is None
        assert flat(await WeightFetcher().fetch(plain)) == flat(base.items())

    with cluster_of(1):
        asyncio.run(main())
