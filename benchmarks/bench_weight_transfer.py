"""What it costs to bring new weights into another process, on the CPU.

    python benchmarks/bench_weight_transfer.py [--quick] [--json FILE]

One receiver in another process takes each offer and copies every tensor into a place of its own, as an engine does. The
time from the offer to the receiver's answer is compared with a bare copy of the same bytes within one process (torch
`copy_`), measured in the same rounds, in turn; the table shows medians. `shared_memory, no checksums` tells what the
checksums cost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from agent_loop.weights import WeightReceiver, WeightSender

MEGABYTE = 1_000_000
SIZES_MB = (200, 1000)
HIDDEN = 1024
BARE = "bare copy"
NO_CHECKSUMS = "shared_memory, no checksums"
TARGET_OF_SHARED_MEMORY = 6.0
"""Times a bare copy: two copies, two readings for the checksums, and the receiver's page faults."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One update on one way."""

    size_mb: int
    way: str
    round: int
    seconds: float


def synthetic_weights(size_mb: int) -> dict[str, Tensor]:
    """bfloat16 matrices and a few vectors, in the sizes of a transformer with a hidden size of 1024."""
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


def receive(connection: Connection, weights: dict[str, Tensor]) -> None:
    """What runs in the other process: `weights` are its own copy of the model."""
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


def update(sender: WeightSender, connection: Connection, weights: dict[str, Tensor]) -> None:
    with sender.offer(weights.items(), weight_version=1) as handle:
        connection.send(handle.to_json())
        connection.recv()


def copy(targets: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        targets[name].copy_(tensor)


def measure(size_mb: int, *, num_rounds: int) -> Iterator[Sample]:
    weights = synthetic_weights(size_mb)
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with ExitStack() as stack:
        connection = stack.enter_context(receiving(size_mb))
        senders = {
            "shared_memory": WeightSender("shared_memory"),
            NO_CHECKSUMS: WeightSender("shared_memory", has_checksums=False),
            "broadcast": WeightSender("broadcast"),
            "disk": WeightSender("disk"),
        }
        ways: dict[str, Callable[[], Any]] = {BARE: partial(copy, targets, weights)}
        for way, sender in senders.items():
            stack.enter_context(sender)
            ways[way] = partial(update, sender, connection, weights)
        for number in range(num_rounds + 1):
            for way, work in ways.items():
                started = time.perf_counter()
                work()
                if number:  # the first one sets up memory and connections
                    yield Sample(size_mb, way, number, time.perf_counter() - started)


def median(samples: list[Sample], *, size_mb: int, way: str) -> float:
    return statistics.median(
        sample.seconds for sample in samples if (sample.size_mb, sample.way) == (size_mb, way)
    )


def ratio(samples: list[Sample], *, size_mb: int, way: str) -> float:
    """To the bare copy of the same round: the median of the rounds."""
    bare = {
        sample.round: sample.seconds for sample in samples if (sample.size_mb, sample.way) == (size_mb, BARE)
    }
    return statistics.median(
        sample.seconds / bare[sample.round]
        for sample in samples
        if (sample.size_mb, sample.way) == (size_mb, way)
    )


def print_table(samples: list[Sample]) -> None:
    table = Table(title="Weights into another process")
    for column in ("weights, MB", "way", "ms", "GB/s", "ratio to a bare copy"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for size_mb, way in dict.fromkeys((sample.size_mb, sample.way) for sample in samples):
        seconds = median(samples, size_mb=size_mb, way=way)
        table.add_row(
            f"{size_mb:,}",
            way,
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples: list[Sample] = []
    for size_mb in SIZES_MB[:1] if options.quick else SIZES_MB:
        samples += measure(size_mb, num_rounds=2 if options.quick else 5)
    print_table(samples)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1))
    missed = missed_targets(samples)
    for line in missed:
        Console().print(f"missed: {line}", highlight=False)
    if missed and not options.quick:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
