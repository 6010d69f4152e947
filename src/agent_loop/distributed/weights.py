"""Weight transfer by Ray's object store: one copy per node, which all servers of the node read in place.

The last published weights stay in the store until the next update, for servers that are restarted. The base weights of
adapters stay until another base is published.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from agent_loop.distributed.ray_module import load_ray
from agent_loop.runtime.threads import run_in_thread
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.shared import adapted_weights

if TYPE_CHECKING:
    from torch import Tensor

    from agent_loop.weights.handle import TensorSpec

BUCKET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Weights in the object store. Holds only the tensors' specs and references to their data."""

    weight_version: int
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Any, ...]
    """References to arrays of bytes in the object store."""
    base: PublishedWeights | None = None
    """Base weights, if the tensors are factors of adapters."""
    base_id: str = ""
    """Id of the base weights; see `AdaptedWeights`."""


class WeightStore:
    """Publishes weights from the driver. All servers of one update share what is published for the first server."""

    def __init__(self) -> None:
        self.current: PublishedWeights | None = None
        self._source: object = None
        self._base: PublishedWeights | None = None
        self._base_id = ""
        self._lock = asyncio.Lock()

    async def publish(
        self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int
    ) -> PublishedWeights:
        """Put weights into the object store and release the previous weights."""
        async with self._lock:
            is_new = self.current is None or self.current.weight_version != weight_version
            if is_new or self._source is not weights:
                self.current = None
                self.current = await run_in_thread(self._publish, weights, weight_version=weight_version)
                self._source = weights
            assert self.current is not None
            return self.current

    def _publish(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> PublishedWeights:
        adapted = adapted_weights(weights)
        if adapted is None or adapted.base_id != self._base_id:
            self._base, self._base_id = None, ""
        if adapted is None:
            return _put(weights, weight_version=weight_version)
        if self._base is None:
            self._base = _put(adapted.base.items(), weight_version=weight_version)
            self._base_id = adapted.base_id
        factors = _put(adapted.to_tensors(), weight_version=weight_version)
        return replace(factors, base=self._base, base_id=self._base_id)


class WeightFetcher:
    """Reads published weights in a server's process. Keeps the last base weights, to fetch them only once."""

    def __init__(self) -> None:
        self._base: tuple[str, dict[str, Tensor]] = ("", {})

    async def fetch(self, published: PublishedWeights) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors. The tensors may be views of the object store: writing to them crashes."""
        if published.base is None:
            return await _read(published)
        base_id, base = self._base
        if base_id != published.base_id:
            base = dict(await _read(published.base))
            self._base = (published.base_id, base)
        factors = dict(await _read(published))
        return AdaptedWeights.from_tensors(factors, base=base, base_id=published.base_id)


async def _read(published: PublishedWeights) -> list[tuple[str, Tensor]]:
    buckets = [await bucket for bucket in published.buckets]
    return await run_in_thread(_unpack, published, buckets)


def _put(weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> PublishedWeights:
    import torch  # late: the driver needs torch only to publish weights

    from agent_loop.weights.tensors import pack

    placed = list(pack(weights, bucket_bytes=BUCKET_BYTES))
    specs = tuple(spec for spec, _ in placed)
    buckets: list[Any] = []
    for _, members in groupby(placed, key=lambda member: member[0].bucket):
        members = list(members)
        last, _ = members[-1]
        bucket_N = torch.empty(max(last.offset + last.num_bytes, 1), dtype=torch.uint8)
        for spec, data_N in members:
            bucket_N[spec.offset : spec.offset + spec.num_bytes].copy_(data_N)
        buckets.append(load_ray().put(bucket_N.numpy()))
    return PublishedWeights(weight_version, specs, tuple(buckets))


def _unpack(published: PublishedWeights, data: list[Any]) -> list[tuple[str, Tensor]]:
    import torch

    from agent_loop.weights.tensors import from_bytes

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        buckets = [torch.frombuffer(bucket, dtype=torch.uint8) for bucket in data]
    return [
        (spec.name, from_bytes(buckets[spec.bucket][spec.offset : spec.offset + spec.num_bytes], spec))
        for spec in published.tensors
    ]
