"""Weights with adapters, and receivers in other processes, controlled over a socket."""

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
from agent_loop.weights.adapted import AdaptedWeights, Factors
from agent_loop.weights.handle import WeightHandle
from agent_loop.weights.receiver import WeightReceiver

ROOT = Path(__file__).parent.parent.parent
SHARED_MEMORY = Path("/dev/shm")
REPLY_TIMEOUT_S = 100.0
"""Longer than a broadcast waits for a receiver that has ended."""

PlainTensor = tuple[str, str, tuple[int, ...], bytes]
"""Name, dtype, shape and bytes of a tensor."""


def flat(weights: Iterator[tuple[str, Tensor]] | Any) -> list[PlainTensor]:
    """Convert tensors to plain values, which can be compared and sent."""
    return [(name, str(tensor.dtype), tuple(tensor.shape), data_of(tensor)) for name, tensor in weights]


def data_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def blocks(pid: int | None = None) -> set[str]:
    """Return the names of the blocks of weights that a process has in shared memory. None is this process."""
    return {path.name for path in SHARED_MEMORY.glob(f"agent-loop-weights-{pid or os.getpid()}-*")}


def block_names(handle: WeightHandle) -> list[str]:
    """Return the names of the blocks of an offer in shared memory."""
    return [name for name, _ in handle.source["blocks"]]


SIZE = 512
ADAPTED = ("layers.0.up", "layers.1.up")


def base_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (100, SIZE), ADAPTED[0]: (SIZE, SIZE), "norm": (SIZE,), ADAPTED[1]: (700, SIZE)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name == "norm" else torch.bfloat16)
        for name, shape in shapes.items()
    }


def adapted_of(
    base: dict[str, Tensor], *, version: int, base_id: str = "first", rank: int = 4
) -> AdaptedWeights:
    """Return the adapted weights of an update. The factors depend on the version."""
    generator = torch.Generator().manual_seed(version)
    factors = {
        name: Factors(
            torch.randn(len(base[name]), rank, generator=generator),
            torch.randn(rank, base[name].shape[1], generator=generator),
        )
        for name in ADAPTED
    }
    return AdaptedWeights(base, base_id=base_id, factors=factors)


@dataclass(slots=True)
class Receiver:
    """A receiver in another process."""

    process: SpawnProcess | subprocess.Popen[bytes]
    connection: Connection

    def start(self, command: str, handle: str) -> None:
        self.connection.send((command, handle))

    def reply(self) -> Any:
        """Return the reply of the process, which is a `WeightsError` if the command raised it."""
        assert self.connection.poll(REPLY_TIMEOUT_S), "the receiver does not reply"
        return self.connection.recv()

    def receive(self, handle: str) -> Any:
        self.start("receive", handle)
        return self.reply()

    def end(self) -> None:
        """Wait until the process exits, so that its resource tracker runs. Kill it after the time limit."""
        self.connection.send(("end", ""))
        try:
            self.wait()
        finally:
            self.process.kill()

    def wait(self) -> None:
        self.connection.close()
        if isinstance(self.process, subprocess.Popen):
            self.process.wait(REPLY_TIMEOUT_S)
        else:
            self.process.join(REPLY_TIMEOUT_S)
            assert self.process.exitcode is not None, "the receiver does not end"


def start_child(rank: int) -> Receiver:
    """Start a multiprocessing child, which shares this process's resource tracker, like the processes of an engine."""
    with Listener() as listener:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(listener.address, rank))
        process.start()
        return Receiver(process, listener.accept())


def start_unrelated(rank: int, *, errors: Path) -> Receiver:
    """Start a process with its own resource tracker. Its stderr is written to the file `errors`."""
    with Listener() as listener, errors.open("wb") as stderr:
        code = f"from tests.weights.receiving import serve; serve({listener.address!r}, {rank})"
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=stderr)
        return Receiver(process, listener.accept())


def serve(address: str, rank: int) -> None:
    """Run commands from the connection. This is the main function of the other process."""
    torch.set_num_threads(1)
    with Client(address) as connection, WeightReceiver(rank) as receiver:
        while True:
            command, handle = connection.recv()
            if command == "end":
                return
            try:
                connection.send(_run(command, handle, receiver))
            except WeightsError as error:
                connection.send(error)


def _run(command: str, handle: str, receiver: WeightReceiver) -> Any:
    match command:
        case "receive":
            return flat(receiver.receive(handle))
        case "receive and exit":
            for each in json.loads(handle):
                receiver.receive(each)
            os._exit(9)
        case _:
            raise ValueError(command)
