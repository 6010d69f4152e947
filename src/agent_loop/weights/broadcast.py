"""Weights through torch.distributed, for engines on other machines: gloo for weights on the CPU, NCCL on GPUs.

The sender is rank 0 of a process group of its own, receiver r is rank r + 1. Neither side touches the default process
group, so that a trainer's or an engine's own one is undisturbed. The group outlives an offer; after a failure the next
offer makes a new one. The handle has the names, dtypes and shapes; checksums come with each bucket.

NCCL is not tested: the tests of this repository run without a GPU.
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
    BucketLayout,
    Meeting,
    connect_store,
    open_store,
)
from agent_loop.weights.checksum import checksum
from agent_loop.weights.handle import TensorSpec, WeightHandle, refuse_duplicates
from agent_loop.weights.packing import from_bytes, pack, to_bytes

GLOO_BUCKET_BYTES = 4 << 20
"""Fits the cache; larger ones cost fresh pages at both ends, which took more than twice the time."""
NCCL_BUCKET_BYTES = 256 << 20
POLL_S = 0.005
GIVEN_UP = "given up"
GRACE_S = 5.0
"""How long to wait for the thread beyond what it may take itself."""


class BroadcastSender:
    """Owns the store at which receivers meet, and the sender's end of the group."""

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
        """See `WeightSender.offer`. Sends in a thread, which leaving the context waits for."""
        tensors = list(weights)
        backend = "nccl" if tensors and tensors[0][1].device.type == "cuda" else "gloo"
        bucket_bytes = NCCL_BUCKET_BYTES if backend == "nccl" else GLOO_BUCKET_BYTES
        packed = list(pack(tensors, bucket_bytes=bucket_bytes))
        specs = tuple(spec for spec, _ in packed)
        refuse_duplicates(specs)
        meeting = self._arrange(backend)
        group, self._group = self._group, None
        sending = _Sending(
            packed, meeting=meeting, store=self._store, group=group, has_checksums=self._has_checksums
        )
        try:
            yield WeightHandle(
                transport="broadcast",
                weight_version=weight_version,
                tensors=specs,
                source=meeting.to_source(),
                has_checksums=self._has_checksums,
            )
            self._group = sending.finish()
        except BaseException as error:
            sending.abort()
            if sending.error is not None and sending.error is not error:
                error.add_note(f"the broadcast itself failed too: {sending.error}")
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = self._store = None

    def _arrange(self, backend: str) -> Meeting:
        if self._store is None:
            self._store = open_store(self._host, timeout_s=self._timeout_s)
        self._num_offers += 1
        return Meeting(
            host=self._host,
            port=self._store.port,
            offer=f"offer-{self._num_offers}",
            backend=backend,
            num_receivers=self._num_receivers,
            timeout_s=float(self._timeout_s),
        )


class BroadcastReceiver:
    """A receiver's end of the group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._address: tuple[str, int] | None = None
        self._store: Any = None
        self._group: BroadcastGroup | None = None

    def receive(self, handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Yields tensors in memory of their own. To stop early breaks the group, which the sender notices."""
        meeting = Meeting.from_handle(handle)
        if self._rank >= meeting.num_receivers:
            raise WeightsError(
                f"the offer is for {meeting.num_receivers} receivers, but this one has rank {self._rank}; set "
                "num_receivers"
            )
        is_complete = False
        try:
            group = self._join(meeting)
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

    def _join(self, meeting: Meeting) -> BroadcastGroup:
        if self._address != (meeting.host, meeting.port):
            self.close()
            self._store = connect_store(meeting)
            self._address = (meeting.host, meeting.port)
        try:
            self._store.set(meeting.ready_key(self._rank), self._group.key if self._group else "")
            key = self._store.get(meeting.group_key).decode()
        except RuntimeError as error:
            raise WeightsError(
                f"the sender of weights at {meeting.host}:{meeting.port} is gone, or waits for another receiver; see "
                "whether all live, and publish again"
            ) from error
        if key == GIVEN_UP:
            raise WeightsError(
                "the sender has given up this offer of weights; see its own error, and publish again"
            )
        if self._group is None or self._group.key != key:
            if self._group is not None:
                self._group.leave()
            self._group = BroadcastGroup.join(self._store, meeting, key=key, rank=self._rank + 1)
        return self._group


class _Sending:
    """One offer's bytes on their way, in a thread beside the caller's use of the control channel."""

    def __init__(
        self,
        packed: list[tuple[TensorSpec, Tensor]],
        *,
        meeting: Meeting,
        store: Any,
        group: BroadcastGroup | None,
        has_checksums: bool,
    ) -> None:
        self._packed = packed
        self._meeting = meeting
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
        """Waits for the end; returns the group for the next offer.

        Raises:
            WeightsError: A receiver is gone or too slow.
        """
        self._thread.join(self._meeting.timeout_s + GRACE_S)
        if self._thread.is_alive():
            raise WeightsError(
                f"a receiver has not taken the weights within {self._meeting.timeout_s:g} s; leave the offer only "
                "when all receivers are done"
            )
        if self.error is not None:
            raise self.error
        return self._group

    def abort(self) -> None:
        """Ends the thread and the group."""
        self._stop.set()
        self._give_up()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        try:
            self._await_receivers()
            if not self._stop.is_set():
                self._gather()
            for _, members in groupby(self._packed, key=lambda member: member[0].bucket):
                group = self._group
                if group is None or self._stop.is_set():
                    self._give_up()
                    return
                group.broadcast(self._fill(list(members)))
        except Exception as error:  # noqa: BLE001  (raised again by `finish`)
            self.error = error
            self._give_up()

    def _await_receivers(self) -> None:
        deadline = time.monotonic() + self._meeting.timeout_s
        waiting = set(range(self._meeting.num_receivers))
        while waiting and not self._stop.is_set():
            waiting = {rank for rank in waiting if not self._store.check([self._meeting.ready_key(rank)])}
            if waiting and time.monotonic() > deadline:
                raise WeightsError(
                    f"of {self._meeting.num_receivers} receivers of a broadcast, {sorted(waiting)} did not join "
                    f"within {self._meeting.timeout_s:g} s; see whether they live, were given the handle, and reach "
                    f"{self._meeting.host}:{self._meeting.port}"
                )
            if waiting:
                self._stop.wait(POLL_S)

    def _gather(self) -> None:
        """Brings all ranks into one group: the one they are in, or a new one if a receiver has been replaced."""
        meeting, store = self._meeting, self._store
        keys = {store.get(meeting.ready_key(rank)).decode() for rank in range(meeting.num_receivers)}
        if self._group is not None and (keys != {self._group.key} or self._group.backend != meeting.backend):
            self._group.leave()
            self._group = None
        key = self._group.key if self._group else f"{meeting.offer}/ranks"
        store.set(meeting.group_key, key)
        if self._group is None:
            self._group = BroadcastGroup.join(store, meeting, key=key, rank=0)

    def _give_up(self) -> None:
        """Tells the receivers that still wait: for the group by its key, in the group by leaving it."""
        with self._leaving:
            group, self._group = self._group, None
        with contextlib.suppress(RuntimeError):
            self._store.set(self._meeting.group_key, GIVEN_UP)
        if group is not None:
            group.leave()

    def _fill(self, members: list[tuple[TensorSpec, Tensor]]) -> Tensor:
        layout = BucketLayout.of([spec for spec, _ in members], has_checksums=self._has_checksums)
        if self._buffer_N is None or len(self._buffer_N) < layout.num_bytes:
            self._buffer_N = torch.empty(layout.num_bytes, dtype=torch.uint8, device=members[0][1].device)
        bucket_N = self._buffer_N[: layout.num_bytes]
        places = [bucket_N[spec.offset : spec.offset + spec.num_bytes] for spec, _ in members]
        for place, (spec, tensor) in zip(places, members, strict=True):
            place.copy_(to_bytes(tensor, name=spec.name))
        if self._has_checksums:
            layout.write_checksums(bucket_N, [checksum(place) for place in places])
        return bucket_N
