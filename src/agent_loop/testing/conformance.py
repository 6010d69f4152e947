"""Harness of the conformance checks: runs a suite of checks on an object and reports the results.

Checks find what an object or the process still holds after a trajectory, and code that blocks the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

from agent_loop.errors import ContractError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded

SubjectT = TypeVar("SubjectT")
CheckVerdict: TypeAlias = Literal["passed", "failed", "skipped"]
TICK_S = 0.005
MAX_BLOCK_S = 0.1
"""Longest time for which code may block the event loop."""
NUM_TRIALS = 3
"""Measurements before the check fails: other load on the machine may spoil one."""
SETTLE_S = 0.5
"""Time in which threads and processes may still end."""
MAX_DEPTH = 4
"""Depth of nested containers that is searched for an instance id."""


class CheckFailed(Exception):
    """Raised by a check if the object breaks the contract."""


class CheckSkipped(Exception):
    """Raised by a check that does not apply to the object. The message is the reason."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check."""

    name: str
    """The rule of the contract, as a sentence."""
    verdict: CheckVerdict
    detail: str = ""
    """Why the check failed or was skipped, or what was measured if it passed."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Results of all checks of one object, in the order in which the checks ran."""

    subject: str
    """Name of the checked object, such as `interaction 'gsm8k'`."""
    results: Sequence[CheckResult]

    @property
    def failures(self) -> list[CheckResult]:
        return [result for result in self.results if result.verdict == "failed"]

    def named(self, verdict: CheckVerdict) -> list[str]:
        """Return the names of the checks with this verdict."""
        return [result.name for result in self.results if result.verdict == verdict]

    def raise_if_failed(self) -> None:
        """Raise a ContractError that names every failed check with its reason."""
        if self.failures:
            lines = [f"{self.subject}: {len(self.failures)} of {len(self.results)} checks failed"]
            lines += [f"{result.name}: {result.detail}" for result in self.failures]
            raise ContractError("\n  ".join(lines))


CheckFunction: TypeAlias = Callable[[SubjectT], Awaitable[str | None]]
"""Raises `CheckFailed` or `CheckSkipped`, or returns what it measured."""
OnResult: TypeAlias = Callable[[CheckResult], None]


class CheckSuite(Generic[SubjectT]):
    """Checks of one contract by their names, in the order in which they run. A name is a rule, as a sentence."""

    def __init__(self, checks: Mapping[str, CheckFunction[SubjectT]] | None = None) -> None:
        self.checks = dict(checks or {})

    def check(self, name: str) -> Callable[[CheckFunction[SubjectT]], CheckFunction[SubjectT]]:
        """Return a decorator that adds a function to the suite."""

        def add(function: CheckFunction[SubjectT]) -> CheckFunction[SubjectT]:
            self.checks[name] = function
            return function

        return add

    def only(self, name: str) -> CheckSuite[SubjectT]:
        """Return a suite of the one check with this name."""
        return CheckSuite({name: self.checks[name]})

    async def run(
        self, subject: SubjectT, *, name: str, timeout_s: float, on_result: OnResult | None = None
    ) -> CheckReport:
        """Run the checks one after the other, each for at most `timeout_s`.

        An exception of any kind is a failure. `name` is that of the subject in the report, as in `interaction 'gsm8k'`.
        """
        clock, results = asyncio.get_running_loop().time, list[CheckResult]()
        for rule, function in self.checks.items():
            started = clock()
            verdict, detail = await _verdict(partial(function, subject), timeout_s=timeout_s)
            results.append(CheckResult(rule, verdict, detail, clock() - started))
            if on_result is not None:
                on_result(results[-1])
        return CheckReport(name, results)


async def _verdict(
    check: Callable[[], Awaitable[str | None]], *, timeout_s: float
) -> tuple[CheckVerdict, str]:
    try:
        return "passed", await run_bounded(check, timeout_s=timeout_s) or ""
    except DeadlineExpired as error:
        return "failed", f"it {error}"
    except CheckSkipped as reason:
        return "skipped", str(reason)
    except Exception as error:  # noqa: BLE001  (user code may raise anything; that is the finding)
        return "failed", _describe_cause(error)


def require(condition: bool, message: str) -> None:
    """Fail the check with `message` unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


def _describe_cause(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return _describe_cause(group.exceptions[0])
    return str(error) if isinstance(error, CheckFailed) else describe_error(error)


async def require_no_blocking(work: Callable[[], Awaitable[object]]) -> str:
    """Fail the check if `work` blocks the event loop for `MAX_BLOCK_S`, and return the time that was measured."""
    blocks_s: list[float] = []
    while len(blocks_s) < NUM_TRIALS and min(blocks_s, default=MAX_BLOCK_S) >= MAX_BLOCK_S:
        blocks_s.append(await _longest_block_s(work))
    least = min(blocks_s)
    require(
        least < MAX_BLOCK_S,
        f"the event loop was blocked for {least:.2f} s; await the slow call, or run it in a thread",
    )
    return f"blocked the event loop for {1000 * least:.0f} ms at most"


async def _longest_block_s(work: Callable[[], Awaitable[object]]) -> float:
    clock = asyncio.get_running_loop().time
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            before = clock()
            await asyncio.sleep(TICK_S)
            longest = max(longest, clock() - before - TICK_S)

    async with asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())
        await asyncio.sleep(0)
        await work()
        await asyncio.sleep(2 * TICK_S)
        ticking.cancel()
    return longest


def require_forgotten(instance_id: str, owner: object, *, after: str) -> None:
    """Fail the check if an attribute of `owner` still holds the id of a trajectory, or text with it."""
    for name, value in vars(owner).items():
        require(not _holds(value, instance_id, depth=0), f"its id is still in self.{name} after {after}")


def count_resources() -> dict[str, int]:
    """Count the tasks of the running event loop, and the threads, open files and child processes of this process."""
    counts = {"task": len(asyncio.all_tasks()), "thread": threading.active_count()}
    if Path("/proc/self/fd").is_dir():
        counts["open file"] = len(os.listdir(Path("/proc/self/fd")))
        counts["process"] = _num_children()
    return counts


async def find_leak(num: int, *, since: Mapping[str, int]) -> str | None:
    """Return the kind of resource that grew by at least `num` since then, and stays so for `SETTLE_S`; or None."""
    clock = asyncio.get_running_loop().time
    give_up = clock() + SETTLE_S
    while True:
        gc.collect()
        leaked = next((kind for kind, held in count_resources().items() if held - since[kind] >= num), None)
        if leaked is None or clock() > give_up:
            return leaked
        await asyncio.sleep(SETTLE_S / 10)


def _holds(value: Any, instance_id: str, *, depth: int) -> bool:
    if isinstance(value, str):
        return instance_id in value
    if depth == MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value)
        return any(_holds(each, instance_id, depth=depth + 1) for pair in items.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds(each, instance_id, depth=depth + 1) for each in cast("list[Any]", value))
    return False


def _num_children() -> int:
    """Count the running child processes of this process."""
    num = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended since
            parent = stat.read_text().rpartition(")")[2].split()[1]
            num += int(parent) == os.getpid()
    return num
