"""Weight transfer through the memory of a GPU that trainer and engine share.

This transport has not been tested on a GPU. The tests cover the handle and the rejected cases.

The weights are copied into buckets on the GPU, which need as much memory as the weights while the offer is open. Each
receiver gets its own export of a bucket: torch counts the exports, and frees a bucket when all of them are released.
Allocators with expandable segments must be able to export memory (`PYTORCH_CUDA_ALLOC_CONF`).
"""

from __future__ import annotations

import base64
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.multiprocessing import reductions

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.tensors import checksum, from_bytes, pack

BUCKET_BYTES = 256 << 20

_reductions: Any = reductions


class CudaIpcSender:
    """Sender that owns the buckets of the open offer. Torch's allocator keeps their memory for the next offer."""

    def __init__(self, *, num_receivers: int) -> None:
        self._num_receivers = num_receivers

    @contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Copy weights to buckets on the GPU and yield their handle. See `WeightSender.offer`."""
        buckets: list[Tensor] = []
        try:
            tensors = tuple(self._fill(buckets, weights))
            for device in {bucket.device for bucket in buckets}:
                torch.cuda.synchronize(device)
            exports = [[_export(bucket) for bucket in buckets] for _ in range(self._num_receivers)]
            yield WeightHandle(
                transport="cuda_ipc",
                weight_version=weight_version,
                tensors=tensors,
                source={"gpu": _uuid(buckets[0].device) if buckets else "", "exports": exports},
            )
        finally:
            if buckets:
                buckets.clear()
                torch.cuda.ipc_collect()

    def close(self) -> None:
        """Do nothing, because the buckets are freed when their offer ends."""

    def _fill(self, buckets: list[Tensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[TensorSpec]:
        for spec, data_N in pack(weights, bucket_bytes=BUCKET_BYTES):
            if data_N.device.type != "cuda" or (buckets and data_N.device != buckets[0].device):
                raise WeightsError(
                    f"weight {spec.name!r} is on {data_N.device}, but cuda_ipc needs all weights on one GPU; set "
                    "rollout.weight_transfer=shared_memory"
                )
            if spec.bucket == len(buckets):
                num_bytes = max(BUCKET_BYTES, spec.num_bytes)
                buckets.append(torch.empty(num_bytes, dtype=torch.uint8, device=data_N.device))
            target_N = buckets[spec.bucket][spec.offset : spec.offset + spec.num_bytes]
            target_N.copy_(data_N)
            yield replace(spec, checksum=checksum(target_N))


def receive_cuda_ipc(handle: WeightHandle, *, rank: int) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield views into the sender's buckets. Unlike tensors of other transports, they must not be written to or
    kept."""
    exports = handle.source["exports"]
    if rank >= len(exports):
        raise WeightsError(
            f"the offer is for {len(exports)} receivers, but this one has rank {rank}; set num_receivers"
        )
    device = _device_of(handle.source["gpu"]) if handle.tensors else None
    buckets = [_import(row, device=device) for row in exports[rank]]
    for spec in handle.tensors:
        yield spec, from_bytes(buckets[spec.bucket][spec.offset : spec.offset + spec.num_bytes], spec)
    if device is not None:
        torch.cuda.synchronize(device)


def _export(bucket: Tensor) -> list[Any]:
    # The handle has plain values, because torch's own format is a pickle, which is unsafe to load from a network.
    _, arguments = _reductions.reduce_tensor(bucket)
    handle, size, offset, _, counter, counter_offset, event, needs_sync = arguments[7:15]
    return [_text(handle), size, offset, _text(counter), counter_offset, _text(event), needs_sync]


def _import(row: Any, *, device: int | None) -> Tensor:
    try:
        handle, size, offset, counter, counter_offset, event, needs_sync = row
        return _reductions.rebuild_cuda_tensor(
            Tensor,
            torch.Size([size]),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            device,
            base64.b64decode(handle),
            size,
            offset,
            False,
            base64.b64decode(counter),
            counter_offset,
            base64.b64decode(event),
            needs_sync,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(
            f"the memory on the sender's GPU cannot be opened: {error}; set "
            "rollout.weight_transfer=shared_memory"
        ) from error


def _uuid(device: torch.device) -> str:
    return str(cast(Any, torch.cuda).get_device_properties(device).uuid)


def _device_of(uuid: str) -> int:
    """Return the index of a GPU in this process, which depends on CUDA_VISIBLE_DEVICES."""
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return index
    raise WeightsError(
        f"the weights are on GPU {uuid!r}, which is not visible to this process; set "
        "rollout.weight_transfer=shared_memory or broadcast"
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
