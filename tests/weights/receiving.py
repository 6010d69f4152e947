"""Receivers in processes of their own, driven over a socket."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights import WeightReceiver

ROOT = Path(__file__).parent.parent.parent
SHARED_MEMORY = Path("/dev/shm")
ANSWER_TIMEOUT_S = 100.0
"""Longer than a broadcast waits for a receiver that is gone."""

Arrived = tuple[str, str, tuple[int, ...], bytes]
"""Name, dtype, shape and bytes of a tensor."""


def flat(weights: Iterator[tuple[str, Tensor]] | Any) -> list[Arrived]:
    """Tensors as plain values, which can be compared and sent."""
    return [(name, str(tensor.dtype), tuple(tensor.shape), data_of(tensor)) for name, tensor in weights]


def data_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def blocks(pid: int | None = None) -> set[str]:
    """The blocks of weights that a process has in the shared memory; this one if None."""
    return {path.name for path in SHARED_MEMORY.glob(f"agent-loop-weights-{pid or os.getpid()}-*")}


@dataclass(slots=True)
class Receiver:
    """A receiver in another process."""

    process: SpawnProcess | subprocess.Popen[bytes]
    connection: Connection

    def begin(self, verb: str, handle: str) -> None:
        self.connection.send((verb, handle))

    def answer(self) -> Any:
        """What the process found; a `WeightsError` if it raised one."""
        assert self.connection.poll(ANSWER_TIMEOUT_S), "the receiver does not answer"
        return self.connection.recv()

    def receive(self, handle: str) -> Any:
        self.begin("receive", handle)
        return self.answer()

    def end(self) -> None:
        """Lets the process end by itself, as its resource tracker should see it; kills one that does not."""
        self.connection.send(("end", ""))
        try:
            self.wait()
        finally:
            self.process.kill()

    def wait(self) -> None:
        self.connection.close()
        if isinstance(self.process, subprocess.Popen):
            self.process.wait(ANSWER_TIMEOUT_S)
        else:
            self.process.join(ANSWER_TIMEOUT_S)
            assert self.process.exitcode is not None, "the receiver does not end"


def start_child(rank: int) -> Receiver:
    """A child of this process, as an engine has them; it shares this process's resource tracker."""
    with Listener() as listener:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(listener.address, rank))
        process.start()
        return Receiver(process, listener.accept())


def start_stranger(rank: int, *, errors: Path) -> Receiver:
    """A process of its own; what it writes to stderr goes to a file."""
    with Listener() as listener, errors.open("wb") as stderr:
        code = f"from tests.weights.receiving import serve; serve({listener.address!r}, {rank})"
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=stderr)
        return Receiver(process, listener.accept())


def serve(address: str, rank: int) -> None:
    """What runs in the other process."""
    torch.set_num_threads(1)
    with Client(address) as connection, WeightReceiver(rank) as receiver:
        while True:
            verb, handle = connection.recv()
            if verb == "end":
                return
            try:
                connection.send(_obey(verb, handle, receiver))
            except WeightsError as error:
                connection.send(error)


def _obey(verb: str, handle: str, receiver: WeightReceiver) -> Any:
    match verb:
        case "receive":
            return flat(receiver.receive(handle))
        case "stop early":
            weights = receiver.receive(handle)
            name, _ = next(weights)
            weights.close()  # type: ignore[attr-defined]
            return name
        case "take one of each and die":
            for each in json.loads(handle):
                next(receiver.receive(each))
            os._exit(9)
        case _:
            raise ValueError(verb)
