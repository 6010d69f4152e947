"""Rollout of the benchmarks of journal and tracing: four turns, three of them with a tool call."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from bench_encoding import Writer, make_tokenizer

from agent_loop.chat.template import ChatTemplate
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.tools.function import function_tool

NUM_ROWS = 256
NUM_CALLS = 3
WORDS_OF_THOUGHT = 60

CostT = TypeVar("CostT")


@function_tool
async def lookup(word: str) -> str:
    """Looks a word up.

    Args:
        word: The word.
    """
    return f"{word} is a word " * 12


class ScriptedRollouts:
    """Rows, and a scripted server without latency.

    The tool runs on the event loop, so that all of a rollout's time is spent in the loop.
    """

    def __init__(self) -> None:
        writer = Writer(seed=0)
        self.template = ChatTemplate(make_tokenizer(writer), tool_parser="hermes")
        self.rows = [{"raw_prompt": [{"role": "user", "content": writer.text(80)}]} for _ in range(NUM_ROWS)]
        call = '<tool_call>\n{"name": "lookup", "arguments": {"word": "%s"}}\n</tool_call><|im_end|>'
        turns = [writer.text(WORDS_OF_THOUGHT) + call % writer.text(1) for _ in range(NUM_CALLS)]
        chance = random.Random(0)
        self._replies = [
            self.template.encoder.encode(text)
            for text in [*turns, writer.text(WORDS_OF_THOUGHT) + "<|im_end|>"]
        ]
        self._logprobs = [[-chance.random() for _ in ids] for ids in self._replies]

    def server(self) -> ScriptedServer:
        return ScriptedServer(self._answer)

    def _answer(self, request: ScriptedRequest) -> ScriptedReply:
        turn = min(request.turn, NUM_CALLS)
        return ScriptedReply(self._replies[turn], logprobs=self._logprobs[turn])


async def measure_alternating(
    without: Callable[[], Awaitable[CostT]], with_it: Callable[[], Awaitable[CostT]], *, num_rounds: int
) -> list[tuple[CostT, CostT]]:
    """Return the costs of both, round by round.

    The order alternates between rounds, and the garbage collector runs before each measurement.
    """
    pairs: list[tuple[CostT, CostT]] = []
    for number in range(num_rounds):
        first, second = (without, with_it) if number % 2 else (with_it, without)
        gc.collect()
        one = await first()
        gc.collect()
        other = await second()
        pairs.append((one, other) if number % 2 else (other, one))
    return pairs


def median_ratio(pairs: Sequence[tuple[CostT, CostT]], part: Callable[[CostT], float]) -> float:
    """Return the median ratio of a part of the cost, with to without."""
    return statistics.median(part(on) / part(off) for off, on in pairs)
