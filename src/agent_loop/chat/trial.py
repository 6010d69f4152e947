"""Comparison of one probe on a chat template: the tokens of a trajectory and those of a full render."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.assistant_turns import completion_ids
from agent_loop.chat.differences import RenderComparison, find_differences, left_out
from agent_loop.chat.encoding import num_shared
from agent_loop.chat.probes import MessagePart, Probe, ProbeTurn, landmarks, schema_landmarks
from agent_loop.chat.report import Cause, ProbeResult, RenderDifference, TemplateVerdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

MAX_FIRST_MESSAGES = 2
"""Number of messages up to which a prompt is encoded with `ChatTemplate.open`, so that cached renders are checked."""

_SCHEMAS = schema_landmarks()


class Renders:
    """Renders of a template. Each conversation is rendered once, since the probes share many."""

    def __init__(self, template: ChatTemplate, *, tools: Sequence[Mapping[str, Any]]) -> None:
        self.template = template
        self._tools = tools
        self._texts: dict[tuple[str, bool], str] = {}
        self._ids: dict[str, list[int]] = {}

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the rendered text of messages."""
        key = (repr(messages), add_generation_prompt)
        if key not in self._texts:
            self._texts[key] = self.template.renderer.text(
                messages, tools=self._tools, add_generation_prompt=add_generation_prompt
            )
        return self._texts[key]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of rendered messages."""
        key = repr(messages)
        if key not in self._ids:
            if len(messages) <= MAX_FIRST_MESSAGES:
                self._ids[key] = self.template.open(messages, tools=self._tools).tolist()
            else:
                self._ids[key] = self.template.encoder.encode(self.text(messages))
        return self._ids[key]


@dataclass(frozen=True, slots=True)
class ProbeTrial:
    """Check of one probe on one template."""

    renders: Renders
    probe: Probe

    def result(self) -> ProbeResult:
        differences: dict[Cause, RenderDifference] = {}
        outcomes: list[_Outcome] = []
        error = ""
        try:
            for turn in self.probe.turns:
                trial = _ProbeTurnTrial(self.renders, self.probe, turn)
                outcomes.append(trial.outcome())
        except ChatTemplateError as refusal:
            error = " ".join(str(refusal).split())
        for difference in [found for outcome in outcomes for found in outcome.differences]:
            differences.setdefault(difference.cause, difference)
        verdict = TemplateVerdict.DIFFERS if differences else TemplateVerdict.EXACT
        return ProbeResult(
            name=self.probe.name,
            has_tools=self.probe.has_tools,
            is_essential=self.probe.is_essential,
            verdict=TemplateVerdict.UNSUPPORTED if error else verdict,
            differences=tuple(sorted(differences.values(), key=lambda found: list(Cause).index(found.cause))),
            error=error,
            position=next((o.position for o in outcomes if o.position is not None), None),
            is_bridge_exact=all(outcome.is_bridge_exact for outcome in outcomes),
            num_bridge_tokens=sum(outcome.num_bridge_tokens for outcome in outcomes),
            num_kept_tokens=sum(outcome.num_kept_tokens for outcome in outcomes),
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of one turn. See `ProbeResult`."""

    differences: Sequence[RenderDifference]
    position: int | None
    is_bridge_exact: bool
    num_bridge_tokens: int
    num_kept_tokens: int


@dataclass(frozen=True, slots=True)
class _ProbeTurnTrial:
    """Check of one turn of a probe on one template."""

    renders: Renders
    probe: Probe
    turn: ProbeTurn

    def outcome(self) -> _Outcome:
        """Compare the tokens of a trajectory after the turn with a full render.

        Raises:
            ChatTemplateError: The template refuses the messages.
        """
        turn, template = self.turn, self.renders.template
        opening = [template.bridges.adapted(message) for message in turn.opening]
        said = template.bridges.adapted(turn.said)
        replies = template.bridges.filled(turn.replies, calls=turn.calls)
        before = self.renders.text(opening)
        ended = self.renders.text([*opening, said], add_generation_prompt=False)
        completion = self._completion(before, ended)
        bridge = self._bridge(completion)
        comparison = RenderComparison(
            prompt=self.renders.ids(opening),
            completion=completion,
            bridge=bridge,
            rendered=self.renders.ids([*opening, said, *replies]),
            landmarks=[*_SCHEMAS, *landmarks([*turn.opening, turn.said, *turn.replies])],
        )
        kept, rendered = comparison.kept, list(comparison.rendered)
        differences = list(self._left_out(before, ended))
        if kept != rendered:
            history = self.renders.text(opening, add_generation_prompt=False)
            differences += find_differences(comparison, history=history, encoder=template.encoder)
        elif self._is_closed_otherwise(completion, bridge):
            differences.append(RenderDifference(Cause.END_TOKEN))
        return _Outcome(
            differences,
            position=None if kept == rendered else num_shared(kept, rendered),
            is_bridge_exact=rendered[len(rendered) - len(bridge) :] == bridge,
            num_bridge_tokens=len(bridge),
            num_kept_tokens=len(kept) - len(rendered),
        )

    def _left_out(self, before: str, ended: str) -> Iterator[RenderDifference]:
        """Yield the texts that the template leaves out of every render."""
        system = [mark for mark in landmarks(self.turn.opening) if mark.part is MessagePart.SYSTEM]
        for mark in (*(_SCHEMAS if self.probe.has_tools else ()), *system):
            if mark.text not in before:
                yield left_out(mark)
        for mark in landmarks([self.turn.said]):
            if mark.text.isascii() and mark.text not in ended:
                yield left_out(mark)

    def _completion(self, before: str, ended: str) -> list[int]:
        """Return the completion of a model that samples what the template renders."""
        template = self.renders.template
        if not ended.startswith(before):
            # The template renders history differently before this turn: start at the last common text before the turn.
            for mark in reversed(landmarks(self.turn.opening)):
                if mark.text in before and mark.text in ended:
                    before, ended = before[before.rindex(mark.text) :], ended[ended.rindex(mark.text) :]
                    break
        shared = before if ended.startswith(before) else template.encoder.shared(ended, before)
        return completion_ids(template, ended[len(shared) :], next_id=self._bridge([])[0])

    def _bridge(self, completion: Sequence[int]) -> list[int]:
        last = completion[-1] if completion else None
        template = self.renders.template
        return template.bridge(self.turn.replies, last_token_id=last, calls=self.turn.calls).tolist()

    def _is_closed_otherwise(self, completion: list[int], bridge: list[int]) -> bool:
        """Return whether the bridge closes a turn that was cut before its end with another token."""
        stopped = bool(completion) and completion[-1] in self.renders.template.end_ids
        cut = completion[:-1] if stopped else completion
        return [*cut, *self._bridge(cut)] != [*completion, *bridge]
