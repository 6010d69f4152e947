"""What the conformance suite found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agent_loop.errors import ServerError

Verdict: TypeAlias = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One sentence of the contract, and whether the server keeps it."""

    name: str
    verdict: Verdict
    detail: str = ""
    """Why it failed or was skipped; what was measured where it passed."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks, in the order they ran."""

    server: str
    results: Sequence[CheckResult]

    @property
    def failures(self) -> list[CheckResult]:
        return [result for result in self.results if result.verdict == "failed"]

    def named(self, verdict: Verdict) -> list[str]:
        """The names of the checks with this verdict."""
        return [result.name for result in self.results if result.verdict == verdict]

    def raise_if_failed(self) -> None:
        """Raises: ServerError: Names every check that failed, with its reason."""
        if self.failures:
            lines = [f"{result.name}: {result.detail}" for result in self.failures]
            summary = f"{len(lines)} of {len(self.results)} checks failed\n  "
            raise ServerError(summary + "\n  ".join(lines), server=self.server)
