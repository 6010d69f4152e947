"""Weight transfer through POSIX shared memory: the sender copies once, and a receiver on the same host does not copy.

Blocks are kept for the next offer, because fresh pages from the kernel cost about ten times as much as the copy. A
block is unlinked when the sender is closed, when an offer did not need it, and when an offer ended with an exception.
In the last case a receiver may still read the block, and the next offer must not write to it. If the sender is killed,
the resource tracker of its process unlinks the blocks. A receiver never owns a block and may end at any time.
"""

from __future__ import annotations

import _posixshmem
import errno
import mmap
import os
import secrets
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.tensors import checksum, from_bytes, pack

BLOCK_BYTES = 1 << 30
"""Size of a block, unless a single tensor is larger. Only the pages that are written use memory."""
NAME_PREFIX = "agent-loop-weights-"
PINNED_BYTES = 32 << 20

_shm: Any = _posixshmem


class SharedMemorySender:
    """Sender that owns the blocks of shared memory."""

    def __init__(self, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[_Block] = []
        self._pinned: Tensor | None = None

    @contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Copy weights to shared memory and yield their handle. See `WeightSender.offer`."""
        try:
            tensors = tuple(self._write(weights))
            num_blocks = 1 + max((spec.bucket for spec in tensors), default=-1)
            self._drop(after=num_blocks)
            yield WeightHandle(
                transport="shared_memory",
                weight_version=weight_version,
                tensors=tensors,
                source={"blocks": [[block.name, block.size] for block in self._blocks]},
            )
        except BaseException:
            self._drop(after=0)
            raise

    def close(self) -> None:
        self._drop(after=0)
        self._pinned = None

    def _write(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[TensorSpec]:
        for spec, data_N in pack(weights, bucket_bytes=self._block_bytes):
            end = spec.offset + spec.num_bytes
            target_N = self._block(spec.bucket, num_bytes=end).reserve(end)[spec.offset : end]
            if data_N.device.type == "cpu":
                target_N.copy_(data_N)
            else:
                self._copy_from_gpu(data_N, target_N)
            yield replace(spec, checksum=checksum(target_N))

    def _block(self, index: int, *, num_bytes: int) -> _Block:
        if index < len(self._blocks) and self._blocks[index].size < num_bytes:
            self._drop(after=index)
        if index == len(self._blocks):
            self._blocks.append(_Block(max(num_bytes, self._block_bytes)))
        return self._blocks[index]

    def _copy_from_gpu(self, data_N: Tensor, target_N: Tensor) -> None:
        """Copy through a buffer of pinned memory, to which the GPU copies at full speed."""
        if self._pinned is None:
            self._pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        for start in range(0, len(data_N), PINNED_BYTES):
            part_N = data_N[start : start + PINNED_BYTES]
            self._pinned[: len(part_N)].copy_(part_N)
            target_N[start : start + len(part_N)].copy_(self._pinned[: len(part_N)])

    def _drop(self, *, after: int) -> None:
        for block in self._blocks[after:]:
            block.unlink()
        del self._blocks[after:]


def receive_shared_memory(handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield views into private mappings. A receiver may write to them without changing the shared memory."""
    blocks = [_attach(name, size=size) for name, size in handle.source["blocks"]]
    for spec in handle.tensors:
        yield spec, from_bytes(blocks[spec.bucket][spec.offset : spec.offset + spec.num_bytes], spec)


class _Block:
    """One block of shared memory. Its mapping lives as long as a tensor refers to it, even after `unlink`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"{NAME_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        self._num_reserved = 0
        self._fd: int = _shm.shm_open(f"/{self.name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        resource_tracker.register(f"/{self.name}", "shared_memory")
        os.ftruncate(self._fd, size)
        self._bytes = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> Tensor:
        """Reserve memory for the first `num_bytes`, and return all bytes of the block."""
        if num_bytes > self._num_reserved:
            try:
                os.posix_fallocate(self._fd, self._num_reserved, num_bytes - self._num_reserved)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                raise WeightsError(
                    f"the shared memory is full: no room for {num_bytes - self._num_reserved:,} more bytes of "
                    "weights; enlarge /dev/shm (docker run --shm-size), or set rollout.weight_transfer=disk"
                ) from None
            self._num_reserved = num_bytes
        return self._bytes

    def unlink(self) -> None:
        os.close(self._fd)
        _shm.shm_unlink(f"/{self.name}")
        resource_tracker.unregister(f"/{self.name}", "shared_memory")


def _attach(name: str, *, size: int) -> Tensor:
    # SharedMemory(name) would register the block with this process's resource tracker, which unlinks it at exit.
    try:
        fd: int = _shm.shm_open(f"/{name}", os.O_RDONLY, mode=0o600)
    except OSError as error:
        raise WeightsError(
            f"the weights are not in shared memory ({error}): the offer has ended, or its sender does not share "
            "/dev/shm with this process; receive before the offer ends, or set rollout.weight_transfer=disk"
        ) from None
    try:
        return torch.frombuffer(mmap.mmap(fd, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(fd)
