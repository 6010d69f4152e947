"""Responses in a finished trajectory, in the order in which its loop requested them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from agent_loop.errors import DataError
from agent_loop.interactions.session import InteractionReply
from agent_loop.recording.serialization import serialize_completion
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import AgentLoopOutput, Feedback, Incident, IncidentKind, Segment, Trajectory
from agent_loop.trajectory.codec import to_plain
from agent_loop.types import Message, Origin, StopReason, TokenChunk, TokenOutput


@dataclass(frozen=True, slots=True)
class RecordedResponses:
    """Recorded responses of a trajectory, in order for each kind, as plain values."""

    completions: Sequence[Mapping[str, Any]]
    """One per assistant turn."""
    calls: Sequence[Sequence[Mapping[str, Any]]]
    """The results of each turn with calls."""
    call_turns: Sequence[int]
    """Assistant turn of each entry of `calls`; the first turn is 1."""
    replies: Sequence[Mapping[str, Any]]
    """Replies of the interaction, its opening message included."""
    reply_turns: Sequence[int]
    """Assistant turn before each reply; 0 for the opening message."""

    def before(self, turn: int) -> RecordedResponses:
        """Return the responses before an assistant turn; the first turn is 1."""
        calls = [number for number, asked in enumerate(self.call_turns) if asked < turn]
        replies = [number for number, asked in enumerate(self.reply_turns) if asked < turn]
        return RecordedResponses(
            self.completions[: turn - 1],
            [self.calls[number] for number in calls],
            [self.call_turns[number] for number in calls],
            [self.replies[number] for number in replies],
            [self.reply_turns[number] for number in replies],
        )


def extract_responses(trajectory: Trajectory) -> RecordedResponses:
    """Return the responses in a trajectory of one episode.

    Raises:
        DataError: The trajectory does not contain all responses: it is one of several branches, has images, or has
            messages that the loops of this package do not write.
    """
    output = trajectory.output
    if trajectory.branch is not None:
        raise DataError(
            f"{trajectory.trajectory_id} is one of several branches of its row, which share what was answered; replay "
            "rows with one trajectory"
        )
    if any(isinstance(message.get("content"), list) for message in output.messages):
        raise DataError(
            f"{trajectory.trajectory_id} has images or other parts in its messages, which are stored as "
            "descriptions only; replay one of text"
        )
    turns = list(_turns(output))
    answers = _answers(output.messages)
    if len(answers) != len(turns) + 1:
        raise DataError(
            f"{trajectory.trajectory_id} has {len(turns)} completions but {len(answers) - 1} assistant messages; "
            "replay one that an episode wrote turn by turn"
        )
    calls = _calls(output, answers, ends=[end for _, end in turns])
    replies = _replies(trajectory, answers, ends=[end for _, end in turns])
    return RecordedResponses(
        completions=[
            serialize_completion(_completion(output, run, turn=n)) for n, (run, _) in enumerate(turns, 1)
        ],
        calls=[results for _, results in calls],
        call_turns=[turn for turn, _ in calls],
        replies=[reply for _, reply in replies],
        reply_turns=[turn for turn, _ in replies],
    )


def _turns(output: AgentLoopOutput) -> Iterator[tuple[list[Segment], int]]:
    """Yield the segments of each completion, and the position of its last token in the response."""
    place = 0
    for is_model, group in groupby(
        output.response_segments, key=lambda segment: segment.origin is Origin.MODEL
    ):
        segments = list(group)
        place += sum(map(len, segments))
        if is_model:
            yield segments, place - 1


def _completion(output: AgentLoopOutput, run: Sequence[Segment], *, turn: int) -> TokenOutput:
    cuts = [
        i.detail for i in output.incidents if i.kind is IncidentKind.CUT_TURN and i.assistant_turn == turn
    ]
    # An aborted completion would be resumed in a replay. This one ended.
    end = TokenChunk([], [], stop_reason="length" if cuts else "stop")
    return TokenOutput.from_chunks([*[segment.as_chunk() for segment in run], end])


def _answers(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages before the first assistant message, and those after each assistant message."""
    answers: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            answers.append([])
        else:
            answers[-1].append(message)
    return answers


def _calls(
    output: AgentLoopOutput, answers: Sequence[Sequence[Message]], *, ends: Sequence[int]
) -> list[tuple[int, list[Mapping[str, Any]]]]:
    """Return the results of each turn with calls. The reply to a malformed call has no name."""
    found: list[tuple[int, list[Mapping[str, Any]]]] = []
    by_tools = [feedback for feedback in output.feedback if feedback.origin is Origin.TOOL]
    for place, group in groupby(by_tools, key=lambda feedback: feedback.place):
        feedback, turn = list(group), _turn_at(place, ends)
        replies = [m for m in answers[turn] if m["role"] == "tool" and "name" in m]
        if [m["name"] for m in replies] != [f.name for f in feedback]:
            raise DataError(
                f"turn {turn} called {', '.join(f.name for f in feedback)}, but is not answered so in the messages; "
                "replay a trajectory of tool_agent"
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
    trajectory: Trajectory, answers: Sequence[Sequence[Message]], *, ends: Sequence[int]
) -> list[tuple[int, Mapping[str, Any]]]:
    output, found = trajectory.output, list[tuple[int, Mapping[str, Any]]]()
    greeting = _greeting(trajectory.row, answers[0])
    if greeting:
        found.append((0, to_plain(InteractionReply(greeting))))
    for feedback in output.feedback:
        if feedback.origin is Origin.INTERACTION:
            turn = _turn_at(feedback.place, ends)
            words = [str(m["content"]) for m in answers[turn] if m["role"] == "user"]
            is_over = output.stop_reason is StopReason.INTERACTION_FINISHED and turn == len(ends)
            reply = InteractionReply(
                words[0] if words else "", score=feedback.reward or 0.0, is_over=is_over, extra=feedback.extra
            )
            found.append((turn, to_plain(reply)))
    return found


def _greeting(row: Mapping[str, Any], opening: Sequence[Message]) -> str:
    """Return the text that an interaction added to the row's prompt when it opened the conversation."""
    prompt: Sequence[Message] = row["raw_prompt"]
    if not row.get("interaction_kwargs") or list(opening) == list(prompt):
        return ""
    said = str(opening[-1]["content"])
    if len(opening) == len(prompt):
        said = said.removeprefix(str(prompt[-1]["content"] or ""))
    return said.removeprefix("\n\n")


def _turn_at(place: int | None, ends: Sequence[int]) -> int:
    """Return the number of the assistant turn that ends at this position; the first is 1."""
    if place not in ends:
        raise DataError(f"something was answered at token {place} of the response, where no turn ends")
    return ends.index(place) + 1
