"""Recorded responses of a finished trajectory, in the order in which its loop requested them, and comparison of a
replay with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from agent_loop.errors import DataError
from agent_loop.interactions.base import Reply
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import AgentLoopOutput, Feedback, Incident, IncidentKind, Segment, Trajectory
from agent_loop.trajectory.codec import encode_completion, to_plain
from agent_loop.types import Message, Origin, StopReason, TokenChunk, TokenOutput


@dataclass(frozen=True, slots=True)
class RecordedResponses:
    """Recorded responses of a trajectory as bytes and plain values. The responses of each kind are in order."""

    completions: Sequence[bytes]
    """One completion per assistant turn, encoded by the codec of trajectories."""
    calls: Sequence[Sequence[Mapping[str, Any]]]
    """Tool results of each turn with calls."""
    call_turns: Sequence[int]
    """Assistant turn of each entry of `calls`. Turns are counted from 1."""
    replies: Sequence[Mapping[str, Any]]
    """Replies of the interaction, including its opening message."""
    reply_turns: Sequence[int]
    """Assistant turn before each reply; 0 for the opening message."""

    def before(self, turn: int) -> RecordedResponses:
        """Return the responses before an assistant turn. Turns are counted from 1."""
        calls = [index for index, call_turn in enumerate(self.call_turns) if call_turn < turn]
        replies = [index for index, reply_turn in enumerate(self.reply_turns) if reply_turn < turn]
        return RecordedResponses(
            self.completions[: turn - 1],
            [self.calls[index] for index in calls],
            [self.call_turns[index] for index in calls],
            [self.replies[index] for index in replies],
            [self.reply_turns[index] for index in replies],
        )


def extract_responses(trajectory: Trajectory) -> RecordedResponses:
    """Return the recorded responses of a trajectory of one episode."""
    output = trajectory.output
    if trajectory.branch is not None:
        raise DataError(
            f"{trajectory.trajectory_id} is one of several branches of its row, which share responses; replay rows "
            "with one trajectory"
        )
    if any(isinstance(message.get("content"), list) for message in output.messages):
        raise DataError(
            f"{trajectory.trajectory_id} has images or other parts in its messages, which are stored as "
            "descriptions only; replay a trajectory with text messages only"
        )
    turns = list(_turns(output))
    messages_after = _messages_after_turns(output.messages)
    if len(messages_after) != len(turns) + 1:
        raise DataError(
            f"{trajectory.trajectory_id} has {len(turns)} completions but {len(messages_after) - 1} assistant "
            "messages; replay a trajectory that an episode wrote turn by turn"
        )
    calls = _calls(output, messages_after, ends=[end for _, end in turns])
    replies = _replies(trajectory, messages_after, ends=[end for _, end in turns])
    return RecordedResponses(
        completions=[
            encode_completion(_completion(output, run, turn=n)) for n, (run, _) in enumerate(turns, 1)
        ],
        calls=[results for _, results in calls],
        call_turns=[turn for turn, _ in calls],
        replies=[reply for _, reply in replies],
        reply_turns=[turn for turn, _ in replies],
    )


def _turns(output: AgentLoopOutput) -> Iterator[tuple[list[Segment], int]]:
    """Yield the segments of each completion, and the index of its last token in the response."""
    num_tokens = 0
    for is_model, group in groupby(
        output.response_segments, key=lambda segment: segment.origin is Origin.MODEL
    ):
        segments = list(group)
        num_tokens += sum(map(len, segments))
        if is_model:
            yield segments, num_tokens - 1


def _completion(output: AgentLoopOutput, run: Sequence[Segment], *, turn: int) -> TokenOutput:
    cuts = [
        i.detail for i in output.incidents if i.kind is IncidentKind.CUT_TURN and i.assistant_turn == turn
    ]
    # A replay would resume a completion with the stop reason "aborted".
    end = TokenChunk([], [], stop_reason="length" if cuts else "stop")
    return TokenOutput.from_chunks([*[segment.as_chunk() for segment in run], end])


def _messages_after_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages before the first assistant message, then the messages after each assistant message."""
    messages_after: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            messages_after.append([])
        else:
            messages_after[-1].append(message)
    return messages_after


def _calls(
    output: AgentLoopOutput, messages_after: Sequence[Sequence[Message]], *, ends: Sequence[int]
) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """Return the assistant turn and the tool results of each turn with calls.

    Replies to malformed calls are left out. Their messages have no name.
    """
    found: list[tuple[int, list[Mapping[str, Any]]]] = []
    by_tools = [feedback for feedback in output.feedback if feedback.origin is Origin.TOOL]
    for end, group in groupby(by_tools, key=lambda feedback: feedback.place):
        feedback, turn = list(group), _turn_at(end, ends)
        replies = [m for m in messages_after[turn] if m["role"] == "tool" and "name" in m]
        if [m["name"] for m in replies] != [f.name for f in feedback]:
            raise DataError(
                f"turn {turn} called {', '.join(f.name for f in feedback)}, but the messages after it have other tool "
                "replies; replay a trajectory of tool_agent"
            )
        is_last = output.stop_reason is StopReason.TOOL_FINISHED and turn == len(ends)
        results = [
            _result(m, f, output, turn=turn, ends=is_last and number == len(replies))
            for number, (m, f) in enumerate(zip(replies, feedback, strict=True), 1)
        ]
        found.append((turn, results))
    return found


def _result(
    message: Message, feedback: Feedback, output: AgentLoopOutput, *, turn: int, ends: bool
) -> Mapping[str, Any]:
    incident = None
    if feedback.incident is not None:
        details = [
            i.detail for i in output.incidents if i.kind is feedback.incident and i.assistant_turn == turn
        ]
        incident = Incident(feedback.incident, details[0] if details else "")
    response = ToolResponse(text=str(message["content"]), ends_episode=ends)
    return to_plain(ToolResult(response, feedback.reward, incident, feedback.extra))


def _replies(
    trajectory: Trajectory, messages_after: Sequence[Sequence[Message]], *, ends: Sequence[int]
) -> list[tuple[int, Mapping[str, Any]]]:
    output, found = trajectory.output, list[tuple[int, Mapping[str, Any]]]()
    greeting = _greeting(trajectory.row, messages_after[0])
    if greeting:
        found.append((0, to_plain(Reply(greeting))))
    for feedback in output.feedback:
        if feedback.origin is Origin.INTERACTION:
            turn = _turn_at(feedback.place, ends)
            texts = [str(m["content"]) for m in messages_after[turn] if m["role"] == "user"]
            is_over = output.stop_reason is StopReason.INTERACTION_FINISHED and turn == len(ends)
            reply = Reply(
                texts[0] if texts else "", score=feedback.reward or 0.0, is_over=is_over, extra=feedback.extra
            )
            found.append((turn, to_plain(reply)))
    return found


def _greeting(row: Mapping[str, Any], opening: Sequence[Message]) -> str:
    """Return the text that an interaction added to the row's prompt when it opened the conversation."""
    prompt: Sequence[Message] = row["raw_prompt"]
    if not row.get("interaction_kwargs") or list(opening) == list(prompt):
        return ""
    text = str(opening[-1]["content"])
    if len(opening) == len(prompt):
        text = text.removeprefix(str(prompt[-1]["content"] or ""))
    return text.removeprefix("\n\n")


def _turn_at(end: int | None, ends: Sequence[int]) -> int:
    """Return the number of the assistant turn whose last token has the index `end`. Turns are counted from 1."""
    if end not in ends:
        raise DataError(f"feedback.place is {end}, where no assistant turn of the response ends")
    return ends.index(end) + 1


SHOWN_TOKENS = 12
"""Maximum number of tokens that a `TokenDifference` holds of each side."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """First token in which a trajectory and its replay differ."""

    index: int
    """Index of the token, counted from the first token of the prompt."""
    old: tuple[int, ...]
    """Tokens of the trajectory from `index`, at most `SHOWN_TOKENS`. Empty if the trajectory is shorter."""
    new: tuple[int, ...]
    """Tokens of the replay from `index`, at most `SHOWN_TOKENS`. Empty if the replay is shorter."""
    where: str
    """Segment of the trajectory that contains the token, for example `tool tokens, assistant turn 2`."""


def first_difference(old: AgentLoopOutput, new: AgentLoopOutput) -> TokenDifference | None:
    """Return the first difference of two trajectories, or None if all tokens are equal."""
    old_ids, new_ids = ([*o.prompt_ids.tolist(), *o.response_ids.tolist()] for o in (old, new))
    differing = (n for n, (a, b) in enumerate(zip(old_ids, new_ids, strict=False)) if a != b)
    index = next(differing, min(len(old_ids), len(new_ids)))
    if index == len(old_ids) == len(new_ids):
        return None
    shown = slice(index, index + SHOWN_TOKENS)
    return TokenDifference(index, tuple(old_ids[shown]), tuple(new_ids[shown]), _segment_of(old, index))


def _segment_of(output: AgentLoopOutput, index: int) -> str:
    """Return a description of the segment that contains a token."""
    turn, end = 0, 0
    for segment in output.segments:
        end += len(segment)
        turn += segment.weight_version is not None
        if index < end:
            return f"{segment.origin} tokens" + (f", assistant turn {turn}" if turn else "")
    return "after its last token"
