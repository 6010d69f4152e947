"""What is known about a chat template after it has been tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """How the tokens of a trajectory compare with a full render of its messages."""

    EXACT = "exact"
    """Token for token the same in every conversation that was tried."""
    LIKELY_EXACT = "likely_exact"
    """The same in the few conversations that are tried when a run starts."""
    DIFFERS = "differs"
    """Not the same, or the template leaves something out of both. The trajectory keeps what the model saw and said."""
    UNSUPPORTED = "unsupported"
    """The template cannot write such a conversation."""


class Kind(StrEnum):
    """What a difference means for a run."""

    LEFT_OUT = "left_out"
    """The template does not show the model what it should see, or cannot write what the model does."""
    REWRITTEN = "rewritten"
    """The template writes earlier turns otherwise once more messages follow."""
    MERGED = "merged"
    """The text is the same, in other tokens."""

    @property
    def meaning(self) -> str:
        """One line for a person to read."""
        return _MEANINGS_OF_KINDS[self]


class Cause(StrEnum):
    """Why a full render differs; the gravest causes first."""

    IGNORED_TOOLS = "ignored_tools"
    IGNORED_SYSTEM_PROMPT = "ignored_system_prompt"
    DROPPED_CALL = "dropped_call"
    DROPPED_TEXT = "dropped_text"
    MOVED_TEXT = "moved_text"
    STRIPPED_REASONING = "stripped_reasoning"
    GENERATION_PROMPT = "generation_prompt"
    END_TOKEN = "end_token"
    MOVED_SYSTEM_PROMPT = "moved_system_prompt"
    INJECTED_PROMPT = "injected_prompt"
    RESERIALISED_CALL = "reserialised_call"
    REGROUPED_TOOLS = "regrouped_tools"
    OTHER = "other"
    MERGED_TOKENS = "merged_tokens"

    @property
    def meaning(self) -> str:
        """One line for a person to read."""
        return _MEANINGS[self]

    @property
    def kind(self) -> Kind:
        """What it means for a run."""
        if self in (Cause.IGNORED_TOOLS, Cause.IGNORED_SYSTEM_PROMPT, Cause.DROPPED_CALL):
            return Kind.LEFT_OUT
        return Kind.MERGED if self is Cause.MERGED_TOKENS else Kind.REWRITTEN


_MEANINGS = {
    Cause.IGNORED_TOOLS: "the template leaves the tools' schemas out; describe them in the system prompt",
    Cause.IGNORED_SYSTEM_PROMPT: "the template leaves the system prompt out; put it into the first user message",
    Cause.DROPPED_CALL: "the template leaves calls of the assistant out",
    Cause.DROPPED_TEXT: "the template leaves text of the assistant out",
    Cause.MOVED_TEXT: "the template moves text of the assistant to another place in the conversation",
    Cause.STRIPPED_REASONING: "the template drops or adds a reasoning block when it renders an earlier turn",
    Cause.GENERATION_PROMPT: "the template takes back its own generation prompt when the turn is over",
    Cause.END_TOKEN: "the template closes an earlier turn with another token than the model's last",
    Cause.MOVED_SYSTEM_PROMPT: "the template moves the system prompt or the tools to a later message",
    Cause.INJECTED_PROMPT: "the template renders the first prompt otherwise once more messages follow",
    Cause.RESERIALISED_CALL: "the template writes the assistant turn otherwise once more messages follow",
    Cause.REGROUPED_TOOLS: "the template groups tool replies otherwise in a longer conversation",
    Cause.OTHER: "see the example",
    Cause.MERGED_TOKENS: "the same text, in other tokens where the turns meet",
}
_MEANINGS_OF_KINDS = {
    Kind.LEFT_OUT: "the template leaves out what the model should see or what it said",
    Kind.REWRITTEN: "the template rewrites history; the trajectory keeps what the model saw and said",
    Kind.MERGED: "the tokenizer merges tokens where turns meet; the trajectory keeps those that the model sampled",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """An example of one cause."""

    cause: Cause
    kept: str = ""
    """What the trajectory holds from there on; merged tokens have bars between them."""
    rendered: str = ""
    """What the full render holds in its place."""
    is_in_no_render: bool = False
    """The template leaves `kept` out even where it is the last that was said. The tokens of both may be equal."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One conversation's comparison."""

    name: str
    has_tools: bool
    is_essential: bool
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    """One for each cause, the gravest first."""
    error: str = ""
    """The template's own, if it cannot write the conversation."""
    position: int | None = None
    """Of the first token that differs."""
    is_bridge_exact: bool = True
    """What follows an assistant turn is the same in both."""
    num_bridge_tokens: int = 0
    num_kept_tokens: int = 0
    """Tokens that the trajectory has more than a full render would leave of it."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The gravest first."""
        return tuple(difference.cause for difference in self.differences)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What a trial of a chat template has shown."""

    results: tuple[ProbeResult, ...]
    has_date: bool = False
    """The template writes today's date into the prompt. It is rendered once, so it does not change on the way."""
    has_reasoning: bool = True
    """The template knows of reasoning. If it does not, the report holds for models that do not reason."""

    is_thorough: bool = True
    """All conversations were tried, not only the few for the start of a run."""

    @property
    def without_tools(self) -> Verdict:
        return self._overall([result for result in self.results if not result.has_tools])

    @property
    def with_tools(self) -> Verdict | None:
        """None if tools were not tried."""
        results = [result for result in self.results if result.has_tools]
        return self._overall(results) if results else None

    @property
    def verdict(self) -> Verdict:
        """Of both, the worse."""
        verdicts = {self.without_tools, self.with_tools}
        return next(verdict for verdict in reversed(Verdict) if verdict in verdicts)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Each once: what is left out first, then the commonest."""
        return _ranked(self.results)

    def kinds(self, *, tools: bool | None = None) -> tuple[Kind, ...]:
        """Return the kinds of difference, the gravest first.

        Args:
            tools: Of the conversations with tools or of those without; None is all.
        """
        results = [result for result in self.results if tools is None or result.has_tools is tools]
        found = {cause.kind for cause in _ranked(results)}
        return tuple(kind for kind in Kind if kind in found)

    def examples(self, cause: Cause) -> list[tuple[ProbeResult, Difference]]:
        """The probes that show a cause."""
        return [(r, found) for r in self.results for found in r.differences if found.cause is cause]

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
            "kinds": {kind: kind.meaning for kind in self.kinds()},
            "causes": {cause: cause.meaning for cause in self.causes},
            "has_date": self.has_date,
            "has_reasoning": self.has_reasoning,
            "probes": [asdict(result) for result in self.results],
        }

    def __str__(self) -> str:
        lines = [f"without tools: {self.without_tools}"]
        if self.with_tools is not None:
            lines.append(f"with tools: {self.with_tools}")
        lines += [f"{cause}: {cause.meaning}" for cause in self.causes]
        lines += [f"{r.name}: {r.error}" for r in self.results if r.verdict is Verdict.UNSUPPORTED]
        return "\n".join(lines)

    def _overall(self, results: Sequence[ProbeResult]) -> Verdict:
        if any(result.verdict is Verdict.UNSUPPORTED and result.is_essential for result in results):
            return Verdict.UNSUPPORTED
        if any(result.differences for result in results):
            return Verdict.DIFFERS
        return Verdict.EXACT if self.is_thorough else Verdict.LIKELY_EXACT


def _ranked(results: Sequence[ProbeResult]) -> tuple[Cause, ...]:
    counts = Counter(cause for result in results for cause in result.causes)
    left_out = [cause for cause in Cause if cause in counts and cause.kind is Kind.LEFT_OUT]
    others = [cause for cause in Cause if cause in counts and cause.kind is not Kind.LEFT_OUT]
    return (*left_out, *sorted(others, key=lambda cause: -counts[cause]))
