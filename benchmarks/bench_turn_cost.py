"""CPU time of a turn in the whole loop, early and late in a conversation of 200 turns and 36,000 tokens.

    python benchmarks/bench_turn_cost.py [--quick] [--json FILE]

The model is a stub that returns 100 tokens with a tool call, without delay. The tool result has 78 tokens. The cost of
a turn is the CPU time from one completion to the next request: ledger, parser, tool, template and balancer.
Conversations run one after the other. The table shows medians of the ten turns up to the named turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from overhead.ours import ENCODERS, LookupServer, OurRunner, load_template
from overhead.shapes import SHAPES, Workload
from overhead.workload import make_workloads
from rich.console import Console
from rich.table import Table

from agent_loop.types import TokenOutput

NUM_TURNS = 201
SHAPE = replace(SHAPES[0], name="turns", num_turns=NUM_TURNS, response_width=36_864, num_conversations=8)
WATCHED = (10, 100, 200)
WINDOW = 10
TARGET = 1.2


class TimingServer(LookupServer):
    """Server that records the CPU time between a completion and the next request."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.seconds: list[float] = []
        """CPU times from each completion to the next request."""
        self._answered_at: float | None = None

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        if self._answered_at is not None:
            self.seconds.append(time.process_time() - self._answered_at)
        output = await super().generate(*args, **kwargs)
        self._answered_at = time.process_time()
        return output

    def end_session(self, request_id: str) -> None:
        self._answered_at = None


async def measure(workload: Workload, *, template: Any, num_rounds: int) -> list[list[float]]:
    """Return the CPU seconds of all turns, by conversation. The first conversation is warm-up and not counted."""
    server = TimingServer(workload)
    runner = OurRunner(workload, template=template, server=server)
    conversations: list[list[float]] = []
    for _ in range(num_rounds):
        for row in runner.rows:
            server.seconds.clear()
            await runner.manager.run([row])
            conversations.append(list(server.seconds))
    return conversations[1:]


def cost(conversations: Sequence[Sequence[float]], turn: int) -> float:
    """Return the CPU seconds of a turn, as the median of the window and of the conversations."""
    return statistics.median(statistics.median(seconds[turn - WINDOW : turn]) for seconds in conversations)


def growth(conversations: Sequence[Sequence[float]], turn: int) -> float:
    """Return the ratio of a turn's cost to that of the first watched turn, as the median of the conversations."""
    return statistics.median(cost([seconds], turn) / cost([seconds], WATCHED[0]) for seconds in conversations)


def print_table(measured: Mapping[str, Sequence[Sequence[float]]]) -> None:
    table = Table(title="CPU time of a turn")
    table.add_column("encoder")
    for column in ("turn", "tokens so far", "ms", "to turn 10"):
        table.add_column(column, justify="right")
    for encoder, conversations in measured.items():
        for turn in WATCHED:
            num_tokens = SHAPE.prompt_tokens + turn * (SHAPE.turn_tokens + SHAPE.reply_tokens)
            table.add_row(
                encoder,
                str(turn),
                f"{num_tokens:,}",
                f"{cost(conversations, turn) * 1e3:.3f}",
                f"{growth(conversations, turn):.2f}",
                end_section=turn == WATCHED[-1],
            )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round; the target is not enforced")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the CPU seconds of all turns to this file"
    )
    options = parser.parse_args()
    measured: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_workloads(Path(folder), shapes=[SHAPE])
        workload = Workload.read(Path(folder), SHAPE.name)
        for encoder in ENCODERS:
            template = load_template(Path(folder), encoder=encoder)
            measured[encoder] = asyncio.run(
                measure(workload, template=template, num_rounds=1 if options.quick else 5)
            )
    print_table(measured)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1))
    missed = [encoder for encoder, turns in measured.items() if growth(turns, WATCHED[-1]) > TARGET]
    for encoder in missed:
        Console().print(
            f"missed: {encoder}: turn {WATCHED[-1]} costs more than {TARGET} times turn {WATCHED[0]}"
        )
    if missed and not options.quick:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
