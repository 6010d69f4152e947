"""Trace of a finished trajectory as a JSON document: scalar values, and the events of its turns.

Each event holds only what is new in it, so a document grows linearly with the tokens of its trajectory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from agent_loop.runtime.activity import WaitKind
from agent_loop.tracing.bounded import bounded
from agent_loop.trajectory import Feedback, Segment, Span, Trajectory
from agent_loop.types import IntArray, Message, Origin

VERSION = 2

Json: TypeAlias = dict[str, Any]
TokenDecoder: TypeAlias = Callable[[IntArray], str]


def trace_document(
    trajectory: Trajectory, attributes: Mapping[str, Any], *, decode: TokenDecoder | None
) -> Json:
    """Return the document of a trajectory that has a trace.

    Args:
        trajectory: Finished trajectory.
        attributes: Attributes by which the trajectory is found in a tracing system.
        decode: Decodes token ids into text. None keeps the ids and leaves out the texts of tools.
    """
    output, trace = trajectory.output, trajectory.trace
    assert trace is not None
    num_prompt_tokens = len(output.prompt_ids)
    return {
        "version": VERSION,
        "attributes": attributes,
        "began_at": trace.began_at,
        "seconds": trace.seconds,
        "stop_reason": output.stop_reason,
        "failure": None if output.failure is None else output.failure.error,
        "reward": trajectory.reward,
        "reward_extra": bounded(trajectory.reward_extra),
        "num_turns": output.num_turns,
        "num_prompt_tokens": num_prompt_tokens,
        "num_response_tokens": sum(map(len, output.segments)) - num_prompt_tokens,
        "num_model_tokens": output.num_model_tokens,
        "events": _EventBuilder(trajectory, trace.spans, num_prompt_tokens, decode).events(),
    }


def events_of(document: Json) -> list[Json]:
    """Return all events of a document, with `began`, `reward` and `end`."""
    end = ("stop_reason", "seconds", "num_turns", "num_prompt_tokens", "num_response_tokens")
    return [
        {"event": "began", "attributes": document["attributes"], "began_at": document["began_at"]},
        *document["events"],
        {"event": "reward", "reward": document["reward"], "extra": document["reward_extra"]},
        {"event": "end", **{name: document[name] for name in (*end, "num_model_tokens", "failure")}},
    ]


class _EventBuilder:
    """Builder of the events of one trajectory.

    The branches of a row share their spans. A span that belongs to no turn of a branch belongs to another branch.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        spans: Sequence[Span],
        num_prompt_tokens: int,
        decode: TokenDecoder | None,
    ) -> None:
        self._output = trajectory.output
        self._is_branch = trajectory.branch is not None
        self._decode = decode
        self._num_prompt_tokens = num_prompt_tokens
        self._turns = [] if decode is None else _turn_messages(trajectory)
        self._spans = sorted(spans, key=attrgetter("start"))
        self._of_turns: set[int] = set()
        """Ids of the spans that were assigned to a turn."""
        self._completions = sorted(self._of_kind(WaitKind.GENERATE), key=_context_length)
        self._context_lengths = [_context_length(span) for span in self._completions]
        self._tools: dict[int | None, list[Span]] = defaultdict(list)
        for span in self._of_kind(WaitKind.TOOL):
            self._tools[span.details.get("place")].append(span)
        self._interactions = iter(self._of_kind(WaitKind.INTERACTION))
        self._feedback: dict[tuple[Origin, int | None], list[Feedback]] = defaultdict(list)
        for each in self._output.feedback:
            self._feedback[each.origin, each.place].append(each)

    def events(self) -> list[Json]:
        """Return the events in the order of the conversation, then the spans of no turn, then the incidents."""
        events: list[Json] = []
        start, turn = 0, -1
        for origin, group in groupby(self._output.segments, key=attrgetter("origin")):
            segments = list(group)
            tokens = self._tokens(segments, start)
            start = end = start + tokens["count"]
            if origin is Origin.PROMPT:
                events.append({"event": "prompt", "tokens": tokens})
            elif origin is Origin.MODEL:
                turn += 1
                completions = self._spans_of_completion(tokens["place"], end)
                events += self._generate_events(turn, tokens, segments[-1].weight_version, completions)
                last_index = end - 1 - self._num_prompt_tokens
                events += self._tool_events(turn, last_index)
                generated_at = max((span.end for span in completions), default=0.0)
                events += self._interaction_events(turn, last_index, generated_at)
            else:
                events.append({"event": "observation", "turn": turn, "origin": origin, "tokens": tokens})
        events += self._other_events()
        events += [
            {"event": "incident", "turn": i.assistant_turn, "kind": i.kind, "detail": i.detail}
            for i in self._output.incidents
        ]
        return events

    def _of_kind(self, kind: WaitKind) -> list[Span]:
        return [span for span in self._spans if span.kind == kind]

    def _tokens(self, segments: Sequence[Segment], start: int) -> Json:
        ids = [segment.token_ids for segment in segments]
        joined = ids[0] if len(ids) == 1 else np.concatenate(ids)
        if self._decode is None:
            return {"place": start, "count": len(joined), "ids": joined, "text": None}
        return {"place": start, "count": len(joined), "ids": None, "text": self._decode(joined)}

    def _spans_of_completion(self, start: int, end: int) -> list[Span]:
        """Return the spans of completions that began with a context of `start` to `end` tokens."""
        low, high = bisect_left(self._context_lengths, start), bisect_left(self._context_lengths, end)
        found = self._completions[low:high]
        if self._is_branch:
            exact = [s for s in found if _context_length(s) + (s.details.get("num_tokens") or 0) == end]
            found = exact[:1] or found
        self._of_turns.update(map(id, found))
        return found

    def _generate_events(
        self, turn: int, tokens: Json, weight_version: int | None, completions: Sequence[Span]
    ) -> Iterator[Json]:
        """Yield one event, or one per server if several servers sampled parts of the turn."""
        for number, span in enumerate(completions or [None]):
            details: Mapping[str, Any] = {} if span is None else span.details
            is_last = span is None or number + 1 == len(completions)
            count = details.get("num_tokens") or 0
            part = {"place": details.get("num_prompt_tokens"), "count": count, "ids": None, "text": None}
            yield {
                "event": "generate",
                "turn": turn,
                "tokens": tokens if is_last else part,
                "weight_version": weight_version,
                "time": None if span is None else _time_of(span),
                "server": "" if span is None else span.name,
                "prefill_s": details.get("prefill_s"),
                "num_cached_tokens": details.get("num_cached_tokens"),
                "num_preempted": details.get("num_preempted") or 0,
            }

    def _tool_events(self, turn: int, last_index: int) -> Iterator[Json]:
        feedback = self._feedback[Origin.TOOL, last_index]
        message, replies = self._turns[turn] if turn < len(self._turns) else ({}, [])
        arguments = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        # The reply to a malformed call has no name.
        texts = [_text_of(reply) for reply in replies if reply["role"] == "tool" and "name" in reply]
        for span in sorted(self._tools[last_index], key=lambda span: span.details["number"]):
            self._of_turns.add(id(span))
            number: int = span.details["number"]
            known = feedback[number] if number < len(feedback) else None
            yield {
                "event": "tool",
                "turn": turn,
                "number": number,
                "name": span.name,
                "time": _time_of(span),
                "arguments": bounded(arguments[number]) if number < len(arguments) else None,
                "reply": texts[number] if number < len(texts) else None,
                "reward": None if known is None else known.reward,
                "incident": None if known is None else known.incident,
            }

    def _interaction_events(self, turn: int, last_index: int, generated_at: float) -> Iterator[Json]:
        _, replies = self._turns[turn] if turn < len(self._turns) else (None, [])
        text = "\n".join(_text_of(reply) for reply in replies if reply["role"] != "tool")
        for feedback in self._feedback[Origin.INTERACTION, last_index]:
            span = next((span for span in self._interactions if span.start >= generated_at), None)
            if span is not None:
                self._of_turns.add(id(span))
            yield {
                "event": "interaction",
                "turn": turn,
                "time": None if span is None else _time_of(span),
                "reply": text or None,
                "reward": feedback.reward,
            }

    def _other_events(self) -> Iterator[Json]:
        for span in self._spans:
            is_of_other_branch = self._is_branch and span.kind in _KINDS_OF_TURNS
            if id(span) not in self._of_turns and not is_of_other_branch:
                details = {key: value for key, value in span.details.items() if key not in _TIME_KEYS}
                yield {
                    "event": "span",
                    "kind": span.kind,
                    "name": span.name,
                    "time": _time_of(span),
                    "details": bounded(details) if details else {},
                }


_KINDS_OF_TURNS = (WaitKind.GENERATE, WaitKind.TOOL, WaitKind.INTERACTION)
_TIME_KEYS = ("span", "within")


def _time_of(span: Span) -> Json:
    details = span.details
    return {
        "start": span.start,
        "end": span.end,
        "span": details.get("span"),
        "within": details.get("within"),
    }


def _context_length(span: Span) -> int:
    """Return the number of context tokens when a completion began."""
    return span.details.get("num_prompt_tokens", -1)


def _turn_messages(trajectory: Trajectory) -> list[tuple[Message, list[Message]]]:
    """Return the assistant message of each completion, and the messages that reply to it."""
    turns: list[tuple[Message, list[Message]]] = []
    for message in trajectory.output.messages:
        if message["role"] == "assistant":
            turns.append((message, []))
        elif turns:
            turns[-1][1].append(message)
    prompt: Sequence[Message] = trajectory.row.get("raw_prompt") or ()
    return turns[sum(message.get("role") == "assistant" for message in prompt) :]


def _text_of(message: Message) -> str:
    """Return the text of a message, with the name of its type in place of an image or video."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: Sequence[Mapping[str, Any]] = content
    return "".join(str(part.get("text", f"<{part.get('type')}>")) for part in parts)
