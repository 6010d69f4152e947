"""Time to send new weights to another process on the CPU.

    python benchmarks/bench_weight_transfer.py [--quick] [--json FILE]

A receiver in another process accepts each offer and copies every tensor to its own memory, as an engine does. The time
from the offer to the receiver's reply is compared with a bare copy of the same bytes within one process (torch
`copy_`), in the same alternating rounds. The table shows medians.

The last rows are for a model with adapters of rank 16 on all matrices. Either the sender merges the adapters and sends
all weights, or it sends only the factors and the receiver merges them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from outcome import conclude
from rich.console import Console
from rich.table import Table
from torch import Tensor

from agent_loop.weights.adapted import AdaptedWeights, Factors
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender

MEGABYTE = 1_000_000
SIZES_MB = (200, 1000)
HIDDEN = 1024
BARE = "bare copy"
MERGED = "adapters merged before"
FACTORS = "factors alone"
RANK = 16
TARGET_OF_SHARED_MEMORY = 6.0
"""Largest accepted ratio to a bare copy: two copies, two reads for the checksums, and the receiver's page faults."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one update."""

    size_mb: int
    way: str
    round: int
    seconds: float
    num_bytes: int
    """Number of sent bytes."""


def synthetic_weights(size_mb: int) -> dict[str, Tensor]:
    """Return bfloat16 matrices and a few vectors with the shapes of a transformer with a hidden size of 1024."""
    weights: dict[str, Tensor] = {}
    num_bytes = 0
    while num_bytes < size_mb * MEGABYTE:
        layer = len(weights) // 3
        for name, shape in {
            "up": (4 * HIDDEN, HIDDEN),
            "attention": (HIDDEN, HIDDEN),
            "norm": (HIDDEN,),
        }.items():
            weights[f"layers.{layer}.{name}.weight"] = torch.randn(shape).bfloat16()
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
    return weights


def with_adapters(weights: dict[str, Tensor]) -> AdaptedWeights:
    factors = {
        name: Factors(torch.randn(len(tensor), RANK), torch.randn(RANK, tensor.shape[1]))
        for name, tensor in weights.items()
        if tensor.ndim == 2
    }
    return AdaptedWeights(weights, base_id="base", factors=factors)


def receive(connection: Connection, weights: dict[str, Tensor]) -> None:
    """Receive updates into `weights`, the receiver's own copy of the model. Runs in the other process."""
    torch.set_num_threads(1)
    with WeightReceiver() as receiver:
        while handle := connection.recv():
            for name, tensor in receiver.receive(handle):
                weights[name].copy_(tensor)
            connection.send("done")


@contextmanager
def receiving(size_mb: int) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, size_mb))
    process.start()
    ours.recv()
    try:
        yield ours
    finally:
        ours.send("")
        process.join()


def serve(connection: Connection, size_mb: int) -> None:
    weights = synthetic_weights(size_mb)
    connection.send("ready")
    receive(connection, weights)


def update(
    sender: WeightSender, connection: Connection, weights: Callable[[], Iterable[tuple[str, Tensor]]]
) -> int:
    """Send one update, and return the number of sent bytes."""
    with sender.offer(weights(), weight_version=1) as handle:
        connection.send(handle.to_json())
        connection.recv()
        return sum(spec.num_bytes for spec in handle.tensors)


def copy(targets: dict[str, Tensor], weights: dict[str, Tensor]) -> int:
    for name, tensor in weights.items():
        targets[name].copy_(tensor)
    return sum(tensor.nbytes for tensor in weights.values())


def measure(size_mb: int, *, num_rounds: int) -> Iterator[Sample]:
    weights = synthetic_weights(size_mb)
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with ExitStack() as stack:
        connection = stack.enter_context(receiving(size_mb))
        senders = {
            "shared_memory": WeightSender("shared_memory"),
            "broadcast": WeightSender("broadcast"),
            "disk": WeightSender("disk"),
            f"shared_memory, {MERGED}": WeightSender("shared_memory"),
            f"shared_memory, {FACTORS}": WeightSender("shared_memory"),
            f"disk, {FACTORS}": WeightSender("disk"),
        }
        adapted = with_adapters(weights)
        adapter_weights: dict[str, Callable[[], Iterable[tuple[str, Tensor]]]] = {
            MERGED: lambda: iter(adapted),
            FACTORS: lambda: adapted,
        }
        ways: dict[str, Callable[[], int]] = {BARE: partial(copy, targets, weights)}
        for way, sender in senders.items():
            stack.enter_context(sender)
            ways[way] = partial(
                update, sender, connection, adapter_weights.get(way.partition(", ")[2], weights.items)
            )
        for number in range(num_rounds + 1):
            for way, work in ways.items():
                started = time.perf_counter()
                num_bytes = work()
                if number:  # the first round allocates memory, opens connections and sends the base
                    yield Sample(size_mb, way, number, time.perf_counter() - started, num_bytes)


def median(samples: list[Sample], *, size_mb: int, way: str) -> float:
    return statistics.median(
        sample.seconds for sample in samples if (sample.size_mb, sample.way) == (size_mb, way)
    )


def ratio(samples: list[Sample], *, size_mb: int, way: str) -> float:
    """Return the ratio to the bare copy of the same round, as the median of the rounds."""
    bare = {
        sample.round: sample.seconds for sample in samples if (sample.size_mb, sample.way) == (size_mb, BARE)
    }
    return statistics.median(
        sample.seconds / bare[sample.round]
        for sample in samples
        if (sample.size_mb, sample.way) == (size_mb, way)
    )


def print_table(samples: list[Sample]) -> None:
    table = Table(title="Sending weights to another process")
    for column in ("weights, MB", "way", "sent, MB", "ms", "GB/s", "ratio to a bare copy"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for size_mb, way in dict.fromkeys((sample.size_mb, sample.way) for sample in samples):
        seconds = median(samples, size_mb=size_mb, way=way)
        sent = next(sample.num_bytes for sample in samples if (sample.size_mb, sample.way) == (size_mb, way))
        table.add_row(
            f"{size_mb:,}",
            way,
            f"{sent / MEGABYTE:.1f}",
            f"{seconds * 1e3:.0f}",
            f"{size_mb / 1000 / seconds:.2f}",
            f"{ratio(samples, size_mb=size_mb, way=way):.1f}",
        )
    Console(width=120).print(table)


def missed_targets(samples: list[Sample]) -> list[str]:
    return [
        f"{size_mb} MB: shared_memory takes {got:.1f} times a bare copy, above {TARGET_OF_SHARED_MEMORY}"
        for size_mb in dict.fromkeys(sample.size_mb for sample in samples)
        if (got := ratio(samples, size_mb=size_mb, way="shared_memory")) > TARGET_OF_SHARED_MEMORY
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="200 MB, two rounds; targets are not enforced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples: list[Sample] = []
    for size_mb in SIZES_MB[:1] if options.quick else SIZES_MB:
        samples += measure(size_mb, num_rounds=2 if options.quick else 5)
    print_table(samples)
    conclude(samples, missed=missed_targets(samples), json_file=options.json, is_quick=options.quick)


if __name__ == "__main__":
    main()
