"""A conversation tried on a chat template: what a trajectory would hold of it, and what a full render holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.differences import Comparison, find_differences, left_out
from agent_loop.chat.encoding import num_shared
from agent_loop.chat.probes import Part, Probe, Turn, landmarks, schema_landmarks
from agent_loop.chat.report import Cause, Difference, ProbeResult, Verdict
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

MAX_FIRST_MESSAGES = 2
"""A system prompt and a question, for which `ChatTemplate.open` has a quicker way that is to be tried, too."""

_SCHEMAS = schema_landmarks()


class Renders:
    """What a template writes, each conversation once: the probes have many in common."""

    def __init__(self, template: ChatTemplate, *, tools: Sequence[Mapping[str, Any]]) -> None:
        self.template = template
        self._tools = tools
        self._texts: dict[tuple[str, bool], str] = {}
        self._ids: dict[str, list[int]] = {}

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return what the template writes."""
        key = (repr(messages), add_generation_prompt)
        if key not in self._texts:
            self._texts[key] = self.template.renderer.text(
                messages, tools=self._tools, add_generation_prompt=add_generation_prompt
            )
        return self._texts[key]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of that, as `ChatTemplate.open` does."""
        key = repr(messages)
        if key not in self._ids:
            if len(messages) <= MAX_FIRST_MESSAGES:
                self._ids[key] = self.template.open(messages, tools=self._tools).tolist()
            else:
                self._ids[key] = self.template.encoder.encode(self.text(messages))
        return self._ids[key]


@dataclass(frozen=True, slots=True)
class Trial:
    """One probe on one template."""

    renders: Renders
    probe: Probe

    def result(self) -> ProbeResult:
        differences: dict[Cause, Difference] = {}
        outcomes: list[_Outcome] = []
        error = ""
        try:
            for turn in self.probe.turns:
                trial = _TurnTrial(self.renders, self.probe, turn)
                outcomes.append(trial.outcome())
        except ChatTemplateError as refusal:
            error = " ".join(str(refusal).split())
        for difference in [found for outcome in outcomes for found in outcome.differences]:
            differences.setdefault(difference.cause, difference)
        verdict = Verdict.DIFFERS if differences else Verdict.EXACT
        return ProbeResult(
            name=self.probe.name,
            has_tools=self.probe.has_tools,
            is_essential=self.probe.is_essential,
            verdict=Verdict.UNSUPPORTED if error else verdict,
            differences=tuple(sorted(differences.values(), key=lambda found: list(Cause).index(found.cause))),
            error=error,
            position=next((o.position for o in outcomes if o.position is not None), None),
            is_bridge_exact=all(outcome.is_bridge_exact for outcome in outcomes),
            num_bridge_tokens=sum(outcome.num_bridge_tokens for outcome in outcomes),
            num_kept_tokens=sum(outcome.num_kept_tokens for outcome in outcomes),
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one turn has shown. See `ProbeResult`."""

    differences: Sequence[Difference]
    position: int | None
    is_bridge_exact: bool
    num_bridge_tokens: int
    num_kept_tokens: int


@dataclass(frozen=True, slots=True)
class _TurnTrial:
    """One turn of a probe on one template."""

    renders: Renders
    probe: Probe
    turn: Turn

    def outcome(self) -> _Outcome:
        """Compare what a trajectory holds after the turn with a full render.

        Raises:
            ChatTemplateError: The template does not accept the messages.
        """
        turn, template = self.turn, self.renders.template
        opening = [template.bridges.adapted(message) for message in turn.opening]
        said = template.bridges.adapted(turn.said)
        replies = template.bridges.filled(turn.replies, calls=turn.calls)
        before = self.renders.text(opening)
        ended = self.renders.text([*opening, said], add_generation_prompt=False)
        completion = self._completion(before, ended)
        bridge = self._bridge(completion)
        comparison = Comparison(
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
            differences.append(Difference(Cause.END_TOKEN))
        return _Outcome(
            differences,
            position=None if kept == rendered else num_shared(kept, rendered),
            is_bridge_exact=rendered[len(rendered) - len(bridge) :] == bridge,
            num_bridge_tokens=len(bridge),
            num_kept_tokens=len(kept) - len(rendered),
        )

    def _left_out(self, before: str, ended: str) -> Iterator[Difference]:
        """What the template leaves out of every render."""
        system = [mark for mark in landmarks(self.turn.opening) if mark.part is Part.SYSTEM]
        for mark in (*(_SCHEMAS if self.probe.has_tools else ()), *system):
            if mark.text not in before:
                yield left_out(mark)
        for mark in landmarks([self.turn.said]):
            if mark.text.isascii() and mark.text not in ended:
                yield left_out(mark)

    def _completion(self, before: str, ended: str) -> list[int]:
        """What a model would have sampled, if it says what the template writes."""
        template = self.renders.template
        if not ended.startswith(before):
            # The template writes history otherwise before this turn: go on from the last text before it.
            for mark in reversed(landmarks(self.turn.opening)):
                if mark.text in before and mark.text in ended:
                    before, ended = before[before.rindex(mark.text) :], ended[ended.rindex(mark.text) :]
                    break
        shared = before if ended.startswith(before) else template.encoder.shared(ended, before)
        ids = template.encoder.encode(ended[len(shared) :])
        if (stop := self._stop(ids)) is not None:
            return ids[: stop + 1]
        bridge = self._bridge([])
        # The turn has no close of its own: the model stops at the next role's opening.
        return [*ids, bridge[0]] if bridge[0] in template.end_ids else ids

    def _stop(self, ids: Sequence[int]) -> int | None:
        """Where a model would have stopped: at the first of the end tokens with which the turn closes."""
        template = self.renders.template
        stop = None
        for position in range(len(ids) - 1, -1, -1):
            if ids[position] in template.end_ids:
                stop = position
            elif template.decode([ids[position]]).strip():
                break
        return stop

    def _bridge(self, completion: Sequence[int]) -> list[int]:
        last = completion[-1] if completion else None
        template = self.renders.template
        return template.bridge(self.turn.replies, last_token_id=last, calls=self.turn.calls).tolist()

    def _is_closed_otherwise(self, completion: list[int], bridge: list[int]) -> bool:
        """Whether the bridge of a turn cut just before its end ends it in another way."""
        stopped = bool(completion) and completion[-1] in self.renders.template.end_ids
        cut = completion[:-1] if stopped else completion
        return [*cut, *self._bridge(cut)] != [*completion, *bridge]
