"""Harness of the conformance checks: runs a suite of checks on an object and reports the results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, Self, TypeAlias, TypeVar, cast

from agent_loop.errors import ContractError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded

SubjectT = TypeVar("SubjectT")
CheckVerdict: TypeAlias = Literal["passed", "failed", "skipped"]
VERDICTS: tuple[CheckVerdict, ...] = ("passed", "failed", "skipped")


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

    @property
    def summary(self) -> str:
        """Number of failed checks, followed by each of them on a line with its reason."""
        lines = [f"{result.name}: {result.detail}" for result in self.failures]
        return "\n  ".join([f"{len(lines)} of {len(self.results)} checks failed", *lines])

    def raise_if_failed(self) -> None:
        """Raise an error that names every failed check with its reason.

        Raises:
            ContractError: A check failed.
        """
        if self.failures:
            raise ContractError(f"{self.subject}: {self.summary}")


CheckFunction: TypeAlias = Callable[[SubjectT], Awaitable[str | None]]
"""Raises `CheckFailed` or `CheckSkipped`, or returns what it measured."""
OnResult: TypeAlias = Callable[[CheckResult], None]


@dataclass(frozen=True, slots=True)
class Check(Generic[SubjectT]):
    """One rule of a contract, and the function that tests it."""

    name: str
    function: CheckFunction[SubjectT]

    async def run(self, subject: SubjectT, *, timeout_s: float) -> CheckResult:
        """Run the check. An exception of any kind, or a run longer than `timeout_s`, is a failure."""
        clock = asyncio.get_running_loop().time
        started = clock()

        def result(verdict: CheckVerdict, detail: str) -> CheckResult:
            return CheckResult(self.name, verdict, detail, clock() - started)

        try:
            detail = await run_bounded(partial(self.function, subject), timeout_s=timeout_s)
        except DeadlineExpired as error:
            return result("failed", f"it {error}")
        except CheckSkipped as reason:
            return result("skipped", str(reason))
        except Exception as error:  # noqa: BLE001  (user code may raise anything; that is the finding)
            return result("failed", _describe_cause(error))
        return result("passed", detail or "")


class CheckSuite(Generic[SubjectT]):
    """Checks of one contract, in the order in which they run."""

    def __init__(self, checks: Iterable[Check[SubjectT]] = ()) -> None:
        self.checks = list(checks)

    @property
    def names(self) -> list[str]:
        return [check.name for check in self.checks]

    def check(self, name: str) -> Callable[[CheckFunction[SubjectT]], CheckFunction[SubjectT]]:
        """Return a decorator that adds a function to the suite.

        Args:
            name: The rule of the contract, as a sentence.
        """

        def add(function: CheckFunction[SubjectT]) -> CheckFunction[SubjectT]:
            self.checks.append(Check(name, function))
            return function

        return add

    def only(self, name: str) -> Self:
        """Return a suite of the one check with this name."""
        return type(self)(check for check in self.checks if check.name == name)

    async def run(
        self, subject: SubjectT, *, name: str, timeout_s: float, on_result: OnResult | None = None
    ) -> CheckReport:
        """Run the checks one after the other.

        Args:
            subject: Object under check, passed to each check.
            name: What to call the subject in the report, as in `interaction 'gsm8k'`.
            timeout_s: Time limit of each check.
            on_result: Called with each result as soon as it is known.
        """
        results: list[CheckResult] = []
        for check in self.checks:
            results.append(await check.run(subject, timeout_s=timeout_s))
            if on_result is not None:
                on_result(results[-1])
        return CheckReport(name, results)


def require(condition: bool, message: str) -> None:
    """Fail the check with `message` unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


def _describe_cause(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return _describe_cause(group.exceptions[0])
    return str(error) if isinstance(error, CheckFailed) else describe_error(error)
