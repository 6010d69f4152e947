"""Conformance suites: sentences of a contract, each tried on the real thing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from agent_loop.errors import ContractError
from agent_loop.runtime.boundary import DeadlineExpired, describe_error, run_bounded

TICK_S = 0.005
LONGEST_BLOCK_S = 0.1
"""How long other trajectories may be held up."""
NUM_TRIALS = 3
"""Of what is told by the clock: a busy machine may spoil one."""
MAX_DEPTH = 4
"""Of what is searched for traces of a trajectory."""

Verdict: TypeAlias = Literal["passed", "failed", "skipped"]


class CheckFailed(Exception):
    """This sentence of the contract is not kept."""


class CheckSkipped(Exception):
    """This sentence says nothing about the thing at hand; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One sentence of the contract, and whether it is kept."""

    name: str
    verdict: Verdict
    detail: str = ""
    """Why it failed or was skipped; what was measured where it passed."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks, in the order they ran."""

    subject: str
    """What was checked, as in `interaction 'gsm8k'`."""
    results: Sequence[CheckResult]

    @property
    def failures(self) -> list[CheckResult]:
        return [result for result in self.results if result.verdict == "failed"]

    def named(self, verdict: Verdict) -> list[str]:
        """The names of the checks with this verdict."""
        return [result.name for result in self.results if result.verdict == verdict]

    @property
    def summary(self) -> str:
        """How many failed, and each of them on a line with its reason."""
        lines = [f"{result.name}: {result.detail}" for result in self.failures]
        return "\n  ".join([f"{len(lines)} of {len(self.results)} checks failed", *lines])

    def raise_if_failed(self) -> None:
        """Raises: ContractError: Names every check that failed, with its reason."""
        if self.failures:
            raise ContractError(f"{self.subject}: {self.summary}")


def require(condition: bool, message: str) -> None:
    """Fails the check unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


async def require_no_blocking(work: Callable[[], Awaitable[object]]) -> str:
    """Fails the check if the event loop stands still while something works; returns for how long it did."""
    blocks_s: list[float] = []
    while len(blocks_s) < NUM_TRIALS and min(blocks_s, default=LONGEST_BLOCK_S) >= LONGEST_BLOCK_S:
        blocks_s.append(await _longest_block_s(work))
    least = min(blocks_s)
    require(
        least < LONGEST_BLOCK_S,
        f"the event loop stood still for {least:.2f} s; await what blocks, or run it in a thread",
    )
    return f"held up for {1000 * least:.0f} ms at most"


def place_held(instance_id: str, thing: object) -> str | None:
    """The attribute of a thing that has an instance's id somewhere in its containers."""
    return next((name for name, value in vars(thing).items() if _holds(value, instance_id, depth=0)), None)


async def run_checks(
    checks: Mapping[str, Callable[[], Awaitable[str | None]]],
    *,
    timeout_s: float,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Runs checks one after the other.

    Args:
        checks: By name. See `run_check`.
        timeout_s: Of each of them.
        on_result: Told of each result as it comes.
    """
    results: list[CheckResult] = []
    for name, check in checks.items():
        results.append(await run_check(name, check, timeout_s=timeout_s))
        if on_result is not None:
            on_result(results[-1])
    return results


async def run_check(
    name: str, check: Callable[[], Awaitable[str | None]], *, timeout_s: float
) -> CheckResult:
    """Runs one check; whatever it raises is its result.

    Args:
        check: Raises `CheckFailed` or `CheckSkipped`, or returns what it measured.
        timeout_s: One that takes longer has failed.
    """
    clock = asyncio.get_running_loop().time
    started = clock()

    def result(verdict: Verdict, detail: str) -> CheckResult:
        return CheckResult(name, verdict, detail, clock() - started)

    try:
        detail = await run_bounded(check, timeout_s=timeout_s)
    except DeadlineExpired as error:
        return result("failed", f"it {error}")
    except CheckSkipped as reason:
        return result("skipped", str(reason))
    except Exception as error:  # noqa: BLE001  (what is checked may raise anything; that is the finding)
        return result("failed", _innermost(error))
    return result("passed", detail or "")


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


def _holds(value: Any, instance_id: str, *, depth: int) -> bool:
    if isinstance(value, str):
        return value == instance_id
    if depth == MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value)
        return any(_holds(each, instance_id, depth=depth + 1) for pair in items.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds(each, instance_id, depth=depth + 1) for each in cast("list[Any]", value))
    return False


def _innermost(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return _innermost(group.exceptions[0])
    return str(error) if isinstance(error, CheckFailed) else describe_error(error)
