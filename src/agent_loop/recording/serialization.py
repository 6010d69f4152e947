"""Conversion of finished trajectories to the plain values and arrays of a journal, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, Segment, Trajectory
from agent_loop.trajectory.codec import from_dict, from_plain, to_dict, to_plain
from agent_loop.types import Message, Row


def serialize_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the trajectories of one rollout as plain values. Segments that branches share are included once."""
    segments = {id(s): s for trajectory in trajectories for s in trajectory.output.segments}
    indices = {key: index for index, key in enumerate(segments)}
    return {
        "segments": to_plain(list(segments.values())),
        "trajectories": [
            {
                **_output_form(trajectory.output, prompt=trajectory.row["raw_prompt"]),
                "segments": [indices[id(s)] for s in trajectory.output.segments],
                "reward": trajectory.reward,
                "reward_extra": dict(trajectory.reward_extra),
                "branch": trajectory.branch,
            }
            for trajectory in trajectories
        ],
    }


def deserialize_trajectories(
    form: Mapping[str, Any], *, row: Row, group: int, rollout: int
) -> list[Trajectory]:
    """Return the trajectories that `serialize_trajectories` serialized."""
    table = from_plain(form["segments"], list[Segment])

    def segments_of(each: Mapping[str, Any]) -> list[Segment]:
        indices: list[int] = each["segments"]
        return [table[index] for index in indices]

    return [
        Trajectory(
            output=_read_output(each, segments=segments_of(each), prompt=row["raw_prompt"]),
            row=row,
            group=group,
            rollout=rollout,
            reward=each["reward"],
            reward_extra=each["reward_extra"],
            branch=each["branch"],
        )
        for each in form["trajectories"]
    ]


def serialize_rewards(trajectory: Trajectory) -> dict[str, Any]:
    """Return the changes that a batch reward function made to a trajectory, as plain values."""
    output, failure = trajectory.output, trajectory.output.failure
    return {
        "branch": trajectory.branch,
        "reward": trajectory.reward,
        "reward_extra": dict(trajectory.reward_extra),
        "failure": to_plain(failure),
        "incidents": to_plain(output.incidents),
    }


def with_recorded_rewards(trajectory: Trajectory, form: Mapping[str, Any]) -> Trajectory:
    """Return a finished trajectory with the changes that `serialize_rewards` recorded."""
    output = trajectory.output
    for incident in from_plain(form["incidents"], list[Incident])[len(output.incidents) :]:
        output = output.noted(incident)
    failure = from_plain(form["failure"], Failure) if form["failure"] else None
    return structs.replace(
        trajectory,
        output=output if failure is None else output.failed(failure),
        reward=form["reward"],
        reward_extra=form["reward_extra"],
    )


def _output_form(output: AgentLoopOutput, *, prompt: Sequence[Message]) -> dict[str, Any]:
    """Return an output without its tokens, and without the messages that are those of the row."""
    messages = output.messages
    begins_with_row = len(messages) >= len(prompt) and all(
        message is row_message for message, row_message in zip(messages, prompt, strict=False)
    )
    num_row_messages = len(prompt) if begins_with_row else 0
    own = {"messages": messages[num_row_messages:], "row_messages": num_row_messages}
    return to_dict(output, with_segments=False) | own


def _read_output(
    form: Mapping[str, Any], *, segments: Sequence[Segment], prompt: Sequence[Message]
) -> AgentLoopOutput:
    messages = [*prompt[: form["row_messages"]], *form["messages"]]
    return from_dict({**form, "messages": messages}, segments=segments)
