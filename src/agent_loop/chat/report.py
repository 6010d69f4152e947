"""Report of `verify_template`: verdicts, causes of differences, and examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class TemplateVerdict(StrEnum):
    """Result of comparing the tokens of a trajectory with a full render of its messages."""

    EXACT = "exact"
    """The tokens were equal in every conversation of the check."""
    DIFFERS = "differs"
    """The tokens were not equal, or the template leaves something out of both sides. The trajectory keeps the tokens
    that the model saw and sampled."""
    UNSUPPORTED = "unsupported"
    """The template cannot render such a conversation."""


class CauseKind(StrEnum):
    """Severity of a cause."""

    LEFT_OUT = "left_out"
    """The template leaves out what the model should see, or calls of the model."""
    REWRITTEN = "rewritten"
    """The template renders earlier turns differently once more messages follow."""
    MERGED = "merged"
    """The text is the same, but its tokens differ."""

    @property
    def meaning(self) -> str:
        """One line for display."""
        return _MEANINGS_OF_KINDS[self]


class Cause(StrEnum):
    """Reason why a full render differs; the most severe first."""

    IGNORED_TOOLS = "ignored_tools"
    IGNORED_SYSTEM_PROMPT = "ignored_system_prompt"
    DROPPED_CALL = "dropped_call"
    DROPPED_TEXT = "dropped_text"
    STRIPPED_REASONING = "stripped_reasoning"
    GENERATION_PROMPT = "generation_prompt"
    END_TOKEN = "end_token"
    REWRITTEN_PROMPT = "rewritten_prompt"
    REWRITTEN_TURN = "rewritten_turn"
    REWRITTEN_REPLIES = "rewritten_replies"
    OTHER = "other"
    MERGED_TOKENS = "merged_tokens"

    @property
    def meaning(self) -> str:
        """One line for display."""
        return _MEANINGS[self]

    @property
    def kind(self) -> CauseKind:
        """Severity of the cause."""
        if self in (Cause.IGNORED_TOOLS, Cause.IGNORED_SYSTEM_PROMPT, Cause.DROPPED_CALL):
            return CauseKind.LEFT_OUT
        return CauseKind.MERGED if self is Cause.MERGED_TOKENS else CauseKind.REWRITTEN


_MEANINGS = {
    Cause.IGNORED_TOOLS: "the template leaves the descriptions of tools out; describe the tools in the system prompt",
    Cause.IGNORED_SYSTEM_PROMPT: "the template leaves the system prompt out; put it into the first user message",
    Cause.DROPPED_CALL: "the template leaves calls of the assistant out",
    Cause.DROPPED_TEXT: "the template leaves text of the assistant out",
    Cause.STRIPPED_REASONING: "the template drops or adds a reasoning block when it renders an earlier turn",
    Cause.GENERATION_PROMPT: "the template takes back its own generation prompt when the turn is over",
    Cause.END_TOKEN: "the template closes an earlier turn with another token than the model's last",
    Cause.REWRITTEN_PROMPT: "the template renders the prompt differently once more messages follow",
    Cause.REWRITTEN_TURN: "the template renders the assistant turn differently once more messages follow",
    Cause.REWRITTEN_REPLIES: "the template renders the replies differently in a longer conversation",
    Cause.OTHER: "see the example",
    Cause.MERGED_TOKENS: "the text is the same, but its tokens differ where the turns meet",
}
_MEANINGS_OF_KINDS = {
    CauseKind.LEFT_OUT: "the template leaves out what the model should see or what it sampled",
    CauseKind.REWRITTEN: "the template rewrites history; the trajectory keeps what the model saw and sampled",
    CauseKind.MERGED: "the tokenizer merges tokens where turns meet; the trajectory keeps those that the model sampled",
}


@dataclass(frozen=True, slots=True)
class RenderDifference:
    """Example of a cause."""

    cause: Cause
    kept: str = ""
    """Text of the trajectory from the difference on; merged tokens are separated by bars."""
    rendered: str = ""
    """Text of the full render from the difference on."""
    is_in_no_render: bool = False
    """Whether the template leaves `kept` out of every render. The tokens of both sides may be equal."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Comparison of one conversation."""

    name: str
    has_tools: bool
    is_essential: bool
    verdict: TemplateVerdict
    differences: tuple[RenderDifference, ...] = ()
    """One example per cause, the most severe first."""
    error: str = ""
    """The template's error, if the template cannot render the conversation."""
    position: int | None = None
    """Index of the first token that differs."""
    is_bridge_exact: bool = True
    """Whether the tokens after an assistant turn are equal."""
    num_bridge_tokens: int = 0
    num_kept_tokens: int = 0
    """Number of tokens of the trajectory minus number of tokens of the full render."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Causes of the differences, the most severe first."""
        return tuple(difference.cause for difference in self.differences)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Result of `verify_template` for a chat template."""

    results: tuple[ProbeResult, ...]
    has_date: bool = False
    """Whether the template writes the date into the prompt. The prompt is rendered once, so the date does not change
    during a trajectory."""
    has_reasoning: bool = True
    """Whether the template renders reasoning. Otherwise the report holds for models that do not reason."""

    @property
    def without_tools(self) -> TemplateVerdict:
        return self._overall([result for result in self.results if not result.has_tools])

    @property
    def with_tools(self) -> TemplateVerdict | None:
        """Verdict of the conversations with tools, or None if there were none."""
        results = [result for result in self.results if result.has_tools]
        return self._overall(results) if results else None

    @property
    def verdict(self) -> TemplateVerdict:
        """The worse of both verdicts."""
        verdicts = {self.without_tools, self.with_tools}
        return next(verdict for verdict in reversed(TemplateVerdict) if verdict in verdicts)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All causes, once each: those of kind `left_out` first, then by frequency."""
        return _ranked(self.results)

    def kinds(self, *, tools: bool | None = None) -> tuple[CauseKind, ...]:
        """Return the kinds of the causes, the most severe first."""
        results = [result for result in self.results if tools is None or result.has_tools is tools]
        found = {cause.kind for cause in _ranked(results)}
        return tuple(kind for kind in CauseKind if kind in found)

    def examples(self, cause: Cause) -> list[tuple[ProbeResult, RenderDifference]]:
        """Return the probes that show a cause, with their examples."""
        return [(r, found) for r in self.results for found in r.differences if found.cause is cause]

    @property
    def limits(self) -> tuple[ProbeResult, ...]:
        """Conversations that the template refuses and that a run does not need."""
        return tuple(
            r for r in self.results if r.verdict is TemplateVerdict.UNSUPPORTED and not r.is_essential
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
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

    def _overall(self, results: Sequence[ProbeResult]) -> TemplateVerdict:
        if any(result.verdict is TemplateVerdict.UNSUPPORTED and result.is_essential for result in results):
            return TemplateVerdict.UNSUPPORTED
        if any(result.differences for result in results):
            return TemplateVerdict.DIFFERS
        return TemplateVerdict.EXACT


def _ranked(results: Sequence[ProbeResult]) -> tuple[Cause, ...]:
    counts = Counter(cause for result in results for cause in result.causes)
    left_out = [cause for cause in Cause if cause in counts and cause.kind is CauseKind.LEFT_OUT]
    others = [cause for cause in Cause if cause in counts and cause.kind is not CauseKind.LEFT_OUT]
    return (*left_out, *sorted(others, key=lambda cause: -counts[cause]))
