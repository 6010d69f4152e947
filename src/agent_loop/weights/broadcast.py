"""Weight transfer through torch.distributed, for engines on other machines: gloo for CPU weights, NCCL for GPU weights.

The sender is rank 0 of a separate process group, and receiver r is rank r + 1. Neither side uses the default process
group, which the trainer or the engine may use. The group is reused by later offers, and replaced after a failure. The
handle has names, dtypes and shapes; checksums are sent with each bucket.

NCCL has not been tested.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.broadcast_group import (
    BroadcastGroup,
    BroadcastRendezvous,
    BucketLayout,
    connect_store,
    open_store,
)
from agent_loop.weights.checksum import checksum
from agent_loop.weights.handle import TensorSpec, WeightHandle, refuse_duplicates
from agent_loop.weights.packing import from_bytes, pack, to_bytes

GLOO_BUCKET_BYTES = 4 << 20
"""Size that fits the CPU cache. Larger buckets need fresh memory pages on both sides and took more than twice as
long."""
NCCL_BUCKET_BYTES = 256 << 20
POLL_S = 0.005
ABORTED = "aborted"
"""Value of the rendezvous's `group_key` for an aborted offer."""
GRACE_S = 5.0
"""Seconds to wait for the thread in addition to its own timeout."""


class BroadcastSender:
    """Sender that owns the store for the rendezvous, and rank 0 of the group."""

    def __init__(self, *, has_checksums: bool, num_receivers: int, host: str, timeout_s: float) -> None:
        self._has_checksums = has_checksums
        self._num_receivers = num_receivers
        self._host = host
        self._timeout_s = timeout_s
        self._store: Any = None
        self._group: BroadcastGroup | None = None
        self._num_offers = 0

    @contextlib.contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Send weights in a thread, which exiting the context waits for. See `WeightSender.offer`."""
        tensors = list(weights)
        backend = "nccl" if tensors and tensors[0][1].device.type == "cuda" else "gloo"
        bucket_bytes = NCCL_BUCKET_BYTES if backend == "nccl" else GLOO_BUCKET_BYTES
        packed = list(pack(tensors, bucket_bytes=bucket_bytes))
        specs = tuple(spec for spec, _ in packed)
        refuse_duplicates(specs)
        rendezvous = self._new_rendezvous(backend)
        group, self._group = self._group, None
        thread = _BroadcastThread(
            packed, rendezvous=rendezvous, store=self._store, group=group, has_checksums=self._has_checksums
        )
        try:
            yield WeightHandle(
                transport="broadcast",
                weight_version=weight_version,
                tensors=specs,
                source=rendezvous.to_source(),
                has_checksums=self._has_checksums,
            )
            self._group = thread.finish()
        except BaseException as error:
            thread.abort()
            if thread.error is not None and thread.error is not error:
                error.add_note(f"the broadcast failed too: {thread.error}")
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = self._store = None

    def _new_rendezvous(self, backend: str) -> BroadcastRendezvous:
        if self._store is None:
            self._store = open_store(self._host, timeout_s=self._timeout_s)
        self._num_offers += 1
        return BroadcastRendezvous(
            host=self._host,
            port=self._store.port,
            offer=f"offer-{self._num_offers}",
            backend=backend,
            num_receivers=self._num_receivers,
            timeout_s=float(self._timeout_s),
        )


class BroadcastReceiver:
    """Receiver's rank of the group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._address: tuple[str, int] | None = None
        self._store: Any = None
        self._group: BroadcastGroup | None = None

    def receive(self, handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yield tensors that own their memory. Stopping early closes the group, so that the sender fails."""
        rendezvous = BroadcastRendezvous.from_handle(handle)
        if self._rank >= rendezvous.num_receivers:
            raise WeightsError(
                f"the offer is for {rendezvous.num_receivers} receivers, but this one has rank {self._rank}; set "
                "num_receivers"
            )
        is_complete = False
        try:
            group = self._join(rendezvous)
            for _, members in groupby(handle.tensors, key=lambda spec: spec.bucket):
                specs = list(members)
                layout = BucketLayout.of(specs, has_checksums=handle.has_checksums)
                bucket_N = torch.empty(layout.num_bytes, dtype=torch.uint8, device=group.device)
                group.broadcast(bucket_N)
                checksums = layout.read_checksums(bucket_N) or [None] * len(specs)
                for spec, crc in zip(specs, checksums, strict=True):
                    data_N = bucket_N[spec.offset : spec.offset + spec.num_bytes]
                    yield replace(spec, checksum=crc), from_bytes(data_N, spec)
            is_complete = True
        finally:
            if not is_complete:
                self.close()

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = self._store = self._address = None

    def _join(self, rendezvous: BroadcastRendezvous) -> BroadcastGroup:
        if self._address != (rendezvous.host, rendezvous.port):
            self.close()
            self._store = connect_store(rendezvous)
            self._address = (rendezvous.host, rendezvous.port)
        try:
            self._store.set(rendezvous.ready_key(self._rank), self._group.key if self._group else "")
            key = self._store.get(rendezvous.group_key).decode()
        except RuntimeError as error:
            raise WeightsError(
                f"the sender of weights at {rendezvous.host}:{rendezvous.port} has ended, or waits for another "
                "receiver; check that all of them are running, and publish again"
            ) from error
        if key == ABORTED:
            raise WeightsError(
                "the sender aborted this offer of weights; see the sender's error, and publish again"
            )
        if self._group is None or self._group.key != key:
            if self._group is not None:
                self._group.leave()
            self._group = BroadcastGroup.join(self._store, rendezvous, key=key, rank=self._rank + 1)
        return self._group


class _BroadcastThread:
    """Broadcasts one offer in a thread, while the caller uses the control channel."""

    def __init__(
        self,
        packed: list[tuple[TensorSpec, Tensor]],
        *,
        rendezvous: BroadcastRendezvous,
        store: Any,
        group: BroadcastGroup | None,
        has_checksums: bool,
    ) -> None:
        self._packed = packed
        self._rendezvous = rendezvous
        self._store = store
        self._group = group
        self._has_checksums = has_checksums
        self._stop = threading.Event()
        self._leaving = threading.Lock()
        self._buffer_N: Tensor | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="agent-loop-broadcast")
        self._thread.start()

    def finish(self) -> BroadcastGroup | None:
        """Wait until the broadcast ends, and return the group for the next offer."""
        self._thread.join(self._rendezvous.timeout_s + GRACE_S)
        if self._thread.is_alive():
            raise WeightsError(
                f"a receiver did not receive the weights within {self._rendezvous.timeout_s:g} s; exit the offer's "
                "context only when all receivers are done"
            )
        if self.error is not None:
            raise self.error
        return self._group

    def abort(self) -> None:
        """Abort the broadcast and close the group."""
        self._stop.set()
        self._abort_receivers()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        try:
            self._await_receivers()
            if not self._stop.is_set():
                self._join_group()
            for _, members in groupby(self._packed, key=lambda member: member[0].bucket):
                group = self._group
                if group is None or self._stop.is_set():
                    self._abort_receivers()
                    return
                group.broadcast(self._fill(list(members)))
        except Exception as error:  # noqa: BLE001  (raised again by `finish`)
            self.error = error
            self._abort_receivers()

    def _await_receivers(self) -> None:
        deadline = time.monotonic() + self._rendezvous.timeout_s
        waiting = set(range(self._rendezvous.num_receivers))
        while waiting and not self._stop.is_set():
            waiting = {rank for rank in waiting if not self._store.check([self._rendezvous.ready_key(rank)])}
            if waiting and time.monotonic() > deadline:
                raise WeightsError(
                    f"of {self._rendezvous.num_receivers} receivers of a broadcast, {sorted(waiting)} did not join "
                    f"within {self._rendezvous.timeout_s:g} s; check that they are running, have the handle, and can "
                    f"reach {self._rendezvous.host}:{self._rendezvous.port}"
                )
            if waiting:
                self._stop.wait(POLL_S)

    def _join_group(self) -> None:
        """Join one group with all ranks: the current group, or a new one if a receiver was replaced."""
        rendezvous, store = self._rendezvous, self._store
        keys = {store.get(rendezvous.ready_key(rank)).decode() for rank in range(rendezvous.num_receivers)}
        if self._group is not None and (
            keys != {self._group.key} or self._group.backend != rendezvous.backend
        ):
            self._group.leave()
            self._group = None
        key = self._group.key if self._group else f"{rendezvous.offer}/ranks"
        store.set(rendezvous.group_key, key)
        if self._group is None:
            self._group = BroadcastGroup.join(store, rendezvous, key=key, rank=0)

    def _abort_receivers(self) -> None:
        """Abort the waiting receivers: by the group's key before they join it, by closing the group afterwards."""
        with self._leaving:
            group, self._group = self._group, None
        with contextlib.suppress(RuntimeError):
            self._store.set(self._rendezvous.group_key, ABORTED)
        if group is not None:
            group.leave()

    def _fill(self, members: list[tuple[TensorSpec, Tensor]]) -> Tensor:
        layout = BucketLayout.of([spec for spec, _ in members], has_checksums=self._has_checksums)
        if self._buffer_N is None or len(self._buffer_N) < layout.num_bytes:
            self._buffer_N = torch.empty(layout.num_bytes, dtype=torch.uint8, device=members[0][1].device)
        bucket_N = self._buffer_N[: layout.num_bytes]
        targets = [bucket_N[spec.offset : spec.offset + spec.num_bytes] for spec, _ in members]
        for target, (spec, tensor) in zip(targets, members, strict=True):
            target.copy_(to_bytes(tensor, name=spec.name))
        if self._has_checksums:
            layout.write_checksums(bucket_N, [checksum(target) for target in targets])
        return bucket_N
