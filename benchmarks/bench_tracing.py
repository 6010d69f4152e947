"""CPU time of a rollout with and without traces, for each writer, on servers without latency.

    python benchmarks/bench_tracing.py [--quick] [--backends file mlflow otel]

A trajectory has four turns, three of them with a tool call. All of the time is spent in the loop. Rounds with and
without traces alternate, and all figures are medians. The columns are:

- `process`: the figure with a target. In each rollout, the CPU time of all threads until everything is written is
  divided by that of the event loop's thread. `process` is this quotient with traces, divided by the quotient without.
  Other load on the machine affects both alike.
- `event loop`: the ratio of the CPU time of the event loop's thread with traces to that without.
- `more` and `of`: milliseconds per trajectory that traces add to the process, and that it needs without traces.
- `verdict`: whether the target is met. If not, the CPU time of a trajectory from which on it is.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import scripted_rollouts
from rich.console import Console
from rich.table import Table
from scripted_rollouts import NUM_CALLS, NUM_ROWS, ScriptedRollouts, measure_alternating, median_ratio

from agent_loop.config import AgentConfig, MultiTurnConfig, RolloutConfig, TraceConfig
from agent_loop.rollout.manager import AgentLoopManager

TARGET = 1.15
"""Largest accepted ratio `process`."""
BACKENDS = ("file", "mlflow", "otel")
ENFORCED = ("file",)
"""Writers for which a missed target is an error."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of one rollout in seconds."""

    event_loop: float
    """CPU time of the event loop's thread until everything is written."""
    wall: float
    """Wall time while trajectories ran."""
    process: float
    """CPU time of all threads until everything is written."""
    num_dropped: int

    @property
    def to_event_loop(self) -> float:
        return self.process / self.event_loop


async def roll_out(rollouts: ScriptedRollouts, trace: TraceConfig) -> Cost:
    """Run one rollout."""
    config = RolloutConfig(
        trace=trace,
        prompt_length=4096,
        response_length=8192,
        agent=AgentConfig(default_agent_loop="tool_agent"),
        multi_turn=MultiTurnConfig(tools=[f"{scripted_rollouts.__file__}:lookup"]),
    )
    async with AgentLoopManager(config, servers=[rollouts.server()], template=rollouts.template) as manager:
        process, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
        await manager.run(rollouts.rows, label="step=1")
        wall = time.perf_counter() - wall
    process, thread = time.process_time() - process, time.thread_time() - thread
    return Cost(thread, wall, process, sum(manager.tracing.num_dropped().values()))


async def compare(
    rollouts: ScriptedRollouts, trace: TraceConfig, *, num_rounds: int
) -> list[tuple[Cost, Cost]]:
    """Return the costs without and with traces, round by round."""
    await roll_out(rollouts, trace)  # warm-up: creates the store and imports modules
    return await measure_alternating(
        lambda: roll_out(rollouts, TraceConfig()), lambda: roll_out(rollouts, trace), num_rounds=num_rounds
    )


def collect(pipe: Connection) -> None:
    """Run a trace collector that accepts everything, and send its port through the pipe."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


@contextmanager
def collector() -> Generator[str]:
    """Run a trace collector in a new process, and yield its URL."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}/v1/traces"
    finally:
        process.terminate()
        process.join()


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; the target is not enforced")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["file", "otel"])
    options = parser.parse_args()
    rollouts, num_rounds = ScriptedRollouts(), 3 if options.quick else 9
    await roll_out(rollouts, TraceConfig())
    table = Table(title=f"{NUM_ROWS} trajectories of {NUM_CALLS + 1} turns; with traces to without")
    for column in ("writer", "token2text", "event loop", "wall", "process", "more, ms", "of, ms", "verdict"):
        table.add_column(column, justify="right")
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder, collector() as address:
        for backend in options.backends:
            for token2text in (False, True):
                trace = TraceConfig(
                    backend=backend,
                    token2text=token2text,
                    path=str(Path(folder) / "traces.jsonl"),
                    tracking_uri=f"sqlite:///{folder}/mlflow.db",
                    otlp_endpoint=address,
                    flush_timeout_s=300,
                )
                pairs = await compare(rollouts, trace, num_rounds=num_rounds)
                assert not any(on.num_dropped for _, on in pairs)
                ratio = process_ratio(pairs)
                if ratio > TARGET and backend in ENFORCED:
                    missed.append(f"{backend}, {ratio:.3f}")
                table.add_row(backend, "on" if token2text else "off", *cells(pairs))
    console = Console(width=120)
    console.print(table)
    if missed and not options.quick:
        console.print(f"missed: {'; '.join(missed)} times the CPU time without traces, above {TARGET}")
        raise SystemExit(1)


def process_ratio(pairs: Sequence[tuple[Cost, Cost]]) -> float:
    off, on = (statistics.median(cost.to_event_loop for cost in side) for side in zip(*pairs, strict=True))
    return on / off


def cells(pairs: Sequence[tuple[Cost, Cost]]) -> list[str]:
    ratio = process_ratio(pairs)
    of_ms = statistics.median(off.process for off, _ in pairs) / NUM_ROWS * 1e3
    more_ms = (ratio - 1) * of_ms
    return [
        f"{median_ratio(pairs, attrgetter('event_loop')):.3f}",
        f"{median_ratio(pairs, attrgetter('wall')):.3f}",
        f"{ratio:.3f}",
        f"{more_ms:+.3f}",
        f"{of_ms:.2f}",
        "met" if ratio <= TARGET else f"met from {more_ms / (TARGET - 1):.0f} ms on",
    ]


if __name__ == "__main__":
    asyncio.run(main())
