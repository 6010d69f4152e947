"""What is known about a chat template after it has been tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How the tokens of a trajectory compare with a full render of its messages."""

    EXACT = "exact"
    """Token for token the same."""
    DIFFERS = "differs"
    """The template renders earlier turns otherwise than the model saw or said them. The trajectory keeps the truth."""
    UNSUPPORTED = "unsupported"
    """The template cannot write such a conversation."""


class Cause(StrEnum):
    """Why a full render differs."""

    STRIPPED_REASONING = "stripped_reasoning"
    GENERATION_PROMPT = "generation_prompt"
    END_TOKEN = "end_token"
    MOVED_SYSTEM_PROMPT = "moved_system_prompt"
    INJECTED_PROMPT = "injected_prompt"
    RESERIALISED_CALL = "reserialised_call"
    DROPPED_CALL = "dropped_call"
    IGNORED_TOOLS = "ignored_tools"
    REGROUPED_TOOLS = "regrouped_tools"
    MERGED_TOKENS = "merged_tokens"
    OTHER = "other"

    @property
    def meaning(self) -> str:
        """One line for a person to read."""
        return _MEANINGS[self]


_MEANINGS = {
    Cause.STRIPPED_REASONING: "the template drops or adds a reasoning block when it renders an earlier turn",
    Cause.GENERATION_PROMPT: "the template takes back its own generation prompt when the turn is over",
    Cause.END_TOKEN: "the template closes an earlier turn with another token than the model's last",
    Cause.MOVED_SYSTEM_PROMPT: "the template moves the system prompt or the tools to a later message",
    Cause.INJECTED_PROMPT: "the template renders the first prompt otherwise once more messages follow",
    Cause.RESERIALISED_CALL: "the template writes the assistant turn otherwise once more messages follow",
    Cause.DROPPED_CALL: "the template leaves the assistant's calls out",
    Cause.IGNORED_TOOLS: "the template leaves the tools' schemas out; describe them in the system prompt",
    Cause.REGROUPED_TOOLS: "the template groups tool replies otherwise in a longer conversation",
    Cause.MERGED_TOKENS: "the same text, in other tokens where the turns meet",
    Cause.OTHER: "see the differing tokens",
}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One conversation's comparison."""

    name: str
    has_tools: bool
    is_essential: bool
    verdict: Verdict
    cause: Cause | None = None
    error: str = ""
    """The template's own, if it cannot write the conversation."""
    position: int | None = None
    """Of the first differing token."""
    kept: str = ""
    """That token in the trajectory."""
    rendered: str = ""
    """That token in the full render."""
    is_bridge_exact: bool = True
    """What follows the assistant turn is the same in both."""
    num_bridge_tokens: int = 0
    num_kept_tokens: int = 0
    """Tokens that the trajectory has more than a full render would leave of it."""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What a trial of a chat template has shown."""

    results: tuple[ProbeResult, ...]
    has_date: bool = False
    """The template writes today's date into the prompt. It is rendered once, so it does not change on the way."""

    @property
    def without_tools(self) -> Verdict:
        return _overall([result for result in self.results if not result.has_tools])

    @property
    def with_tools(self) -> Verdict | None:
        """None if tools were not tried."""
        results = [result for result in self.results if result.has_tools]
        return _overall(results) if results else None

    @property
    def verdict(self) -> Verdict:
        """Of both, the worse."""
        verdicts = {self.without_tools, self.with_tools}
        return next(v for v in (Verdict.UNSUPPORTED, Verdict.DIFFERS, Verdict.EXACT) if v in verdicts)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Each once, the commonest first."""
        causes = [result.cause for result in self.results if result.cause is not None]
        return tuple(sorted(set(causes), key=lambda cause: (-causes.count(cause), cause)))

    @property
    def limits(self) -> tuple[ProbeResult, ...]:
        """What the template refuses, beside what it must be able to write."""
        return tuple(r for r in self.results if r.verdict is Verdict.UNSUPPORTED and not r.is_essential)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.verdict,
            "without_tools": self.without_tools,
            "with_tools": self.with_tools,
            "causes": {cause: cause.meaning for cause in self.causes},
            "has_date": self.has_date,
            "probes": [asdict(result) for result in self.results],
        }

    def __str__(self) -> str:
        lines = [f"without tools: {self.without_tools}"]
        if self.with_tools is not None:
            lines.append(f"with tools: {self.with_tools}")
        lines += [f"{cause}: {cause.meaning}" for cause in self.causes]
        lines += [f"{r.name}: {r.error}" for r in self.results if r.verdict is Verdict.UNSUPPORTED]
        return "\n".join(lines)


def _overall(results: Sequence[ProbeResult]) -> Verdict:
    if any(result.verdict is Verdict.UNSUPPORTED and result.is_essential for result in results):
        return Verdict.UNSUPPORTED
    if any(result.verdict is Verdict.DIFFERS for result in results):
        return Verdict.DIFFERS
    return Verdict.EXACT
