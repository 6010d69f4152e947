"""What a trajectory costs in calls: a figure that is the same on every machine.

    python -m tests.rollout.call_counts

writes the present figures beside this file, for `test_call_counts.py` to hold later ones against.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import agent_loop
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.testing import run_virtual
from agent_loop.tools.function import function_tool
from agent_loop.types import StopReason
from tests.helpers import calls, says, user
from tests.rollout.harness import Stage

STORED = Path(__file__).with_name("call_counts.json")
PACKAGE = str(Path(agent_loop.__file__).parent)
NUM_TURNS = 3
FEW, MANY = 8, 24
"""Trajectories of two rollouts; what one takes more than the other is what trajectories cost."""


@function_tool
async def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another one.
    """
    return a + b


def calls_per_trajectory() -> dict[str, float]:
    """Of a tool loop of three turns: calls of this package's functions, calls that these make to other Python code, and
    tasks begun."""
    _counts(FEW)  # what is made at first use
    few, many = _counts(FEW), _counts(MANY)
    return {name: (many[name] - few[name]) / (MANY - FEW) for name in ("calls", "calls_out", "tasks")}


def _counts(num_trajectories: int) -> Counter[str]:
    counted: Counter[str] = Counter()
    stage = Stage(_answer, tools=[add], silence_s=120.0)
    jobs = stage.jobs([{"raw_prompt": user("2 + 3?")}] * num_trajectories)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(_counting_tasks(counted))
        with _counting_calls(counted):
            trajectories = await stage.worker.run(jobs)
        assert all(t.output.stop_reason is StopReason.ANSWERED for t in trajectories)

    run_virtual(main())
    return counted


def _answer(request: ScriptedRequest) -> ScriptedReply:
    return says("5") if request.turn == NUM_TURNS - 1 else calls("add", a=2, b=3)


@contextmanager
def _counting_calls(counted: Counter[str]) -> Iterator[None]:
    """Counts functions alone: what Python makes of comprehensions differs from version to version."""

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(PACKAGE):
            counted["calls"] += 1
        elif frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(PACKAGE):
            counted["calls_out"] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def _counting_tasks(counted: Counter[str]) -> Any:
    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        counted["tasks"] += 1
        return asyncio.Task(coroutine, loop=loop, **more)

    return make


if __name__ == "__main__":
    STORED.write_text(json.dumps(calls_per_trajectory(), indent=1) + "\n")
