"""What the journal costs a rollout: CPU time per trajectory with it and without, on servers that answer at once.

    python benchmarks/bench_journal.py [--quick]

A trajectory is three turns with a tool call and an answer, so that all of the time is the loop's own: templates,
tokens, parsing, tools, records. Rounds with and without the journal take turns; the table shows medians.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench_encoding import Writer, make_tokenizer
from rich.console import Console
from rich.table import Table

from agent_loop.chat.template import ChatTemplate
from agent_loop.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.rollout.journal.step import StepKey, open_journal
from agent_loop.rollout.worker import AgentLoopWorker, Job
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.tools.function import function_tool

assert ToolAgentLoop

NUM_ROWS = 256
NUM_CALLS = 3
WORDS_OF_THOUGHT = 60
TARGET = 1.20


@function_tool
def lookup(word: str) -> str:
    """Looks a word up.

    Args:
        word: The word.
    """
    return f"{word} is a word " * 12


class Bench:
    """The same rollout, again and again."""

    def __init__(self) -> None:
        writer = Writer(seed=0)
        self._template = ChatTemplate(make_tokenizer(writer), tool_parser="hermes")
        call = '<tool_call>\n{"name": "lookup", "arguments": {"word": "%s"}}\n</tool_call><|im_end|>'
        encode = self._template.tokenizer.backend_tokenizer.encode
        chance = random.Random(0)
        said = [writer.text(WORDS_OF_THOUGHT) + call % writer.text(1) for _ in range(NUM_CALLS)]
        self._replies = [
            encode(text, add_special_tokens=False).ids
            for text in [*said, writer.text(WORDS_OF_THOUGHT) + "<|im_end|>"]
        ]
        self._log_probs = [[-chance.random() for _ in ids] for ids in self._replies]
        self.rows = [{"raw_prompt": [{"role": "user", "content": writer.text(80)}]} for _ in range(NUM_ROWS)]

    def _answer(self, request: ScriptedRequest) -> ScriptedReply:
        turn = min(request.turn, NUM_CALLS)
        return ScriptedReply(self._replies[turn], log_probs=self._log_probs[turn])

    async def run(self, path: Path | None) -> tuple[float, float]:
        """CPU seconds and wall seconds of one rollout."""
        worker = AgentLoopWorker(
            LoopContext(
                server_manager=AsyncLLMServerManager([ScriptedServer(self._answer)]),
                template=self._template,
                limits=EpisodeLimits(prompt_length=4096, response_length=8192),
                tools={"lookup": lookup},
            ),
            loops=LoopRegistry(),
            default_agent_loop="tool_agent",
        )
        jobs: Sequence[Job] = [Job(row, group, 0, {}) for group, row in enumerate(self.rows)]
        started, wall = time.process_time(), time.perf_counter()
        if path is None:
            await worker.run(jobs)
        else:
            key = StepKey.of(self.rows, step=1, weight_version=0, num_samples=1, settings={})
            async with open_journal(path, key=key, rows=self.rows, resume=False) as journal:
                trajectories = await worker.run(journal.divide(jobs)[1])
                await journal.complete(trajectories)
        return time.process_time() - started, time.perf_counter() - wall


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three rounds; the target is not enforced")
    options = parser.parse_args()
    bench = Bench()
    await bench.run(None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for number in range(3 if options.quick else 15):
            if number % 2:
                off, on = await bench.run(None), await bench.run(path)
            else:
                on, off = await bench.run(path), await bench.run(None)
            pairs.append((off, on))
        num_bytes = path.stat().st_size
    cpu = statistics.median(on[0] / off[0] for off, on in pairs)
    wall = statistics.median(on[1] / off[1] for off, on in pairs)
    table = Table(title=f"{NUM_ROWS} trajectories of {NUM_CALLS + 1} turns")
    for column in ("", "without, ms per trajectory", "with, ms per trajectory", "ratio (median of pairs)"):
        table.add_column(column, justify="right")
    for name, place, ratio in (("CPU", 0, cpu), ("wall", 1, wall)):
        of_off = statistics.median(off[place] for off, _ in pairs) / NUM_ROWS * 1e3
        of_on = statistics.median(on[place] for _, on in pairs) / NUM_ROWS * 1e3
        table.add_row(name, f"{of_off:.3f}", f"{of_on:.3f}", f"{ratio:.3f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"{num_bytes / NUM_ROWS:.0f} bytes per trajectory")
    if cpu > TARGET and not options.quick:
        console.print(f"missed: {cpu:.3f} of the CPU time without, above {TARGET}")
        raise SystemExit(1)


if __name__ == "__main__":
    asyncio.run(main())
