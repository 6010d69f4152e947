"""Conversion of completions and finished trajectories to the plain values and arrays of a journal, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import structs

from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, Segment, Trajectory
from agent_loop.trajectory.codec import (
    decode_completion,
    encode_completion,
    from_dict,
    from_plain,
    to_dict,
    to_plain,
)
from agent_loop.types import IntArray, Message, Row, TokenOutput, as_token_ids


class FindEpisode(Protocol):
    """Function that returns the number of the episode that recorded the segments, or None if no episode did."""

    def __call__(self, segments: Sequence[Segment]) -> int | None: ...


NO_TOKENS = as_token_ids([])


def serialize_completion(output: TokenOutput, *, prefix: IntArray = NO_TOKENS) -> dict[str, Any]:
    """Return a completion as plain values. Log-probs are float32, as in a segment.

    Args:
        output: The completion.
        prefix: Tokens with which the turn begins, and which the model did not sample.
    """
    form = {"completion": encode_completion(output, logprob_type=np.float32)}
    return {**form, "prefix": prefix} if len(prefix) else form


def deserialize_completion(form: Mapping[str, Any]) -> TokenOutput:
    """Return the completion that `serialize_completion` serialized."""
    return decode_completion(form["completion"])


def deserialize_prefix(form: Mapping[str, Any]) -> IntArray:
    """Return the prefix that `serialize_completion` serialized; empty if there was none."""
    return form.get("prefix", NO_TOKENS)


def serialize_trajectories(
    trajectories: Sequence[Trajectory], *, find_episode: FindEpisode
) -> dict[str, Any]:
    """Return the trajectories of one rollout as plain values.

    Tokens that the journal already contains are referenced by the number of their episode.
    """
    episodes = [find_episode(trajectory.output.segments) for trajectory in trajectories]
    segments: dict[int, Segment] = {}
    if None in episodes:
        segments = {id(s): s for trajectory in trajectories for s in trajectory.output.segments}
    indices = {key: index for index, key in enumerate(segments)}
    return {
        "segments": to_plain(list(segments.values())),
        "trajectories": [
            {
                **_output_form(trajectory.output, prompt=trajectory.row["raw_prompt"]),
                "lane": None if segments else episode,
                "segments": [indices[id(s)] for s in trajectory.output.segments] if segments else [],
                "reward": trajectory.reward,
                "reward_extra": dict(trajectory.reward_extra),
                "branch": trajectory.branch,
            }
            for trajectory, episode in zip(trajectories, episodes, strict=True)
        ],
    }


def deserialize_trajectories(
    form: Mapping[str, Any], *, episodes: Mapping[int, Sequence[Segment]], row: Row, group: int, rollout: int
) -> list[Trajectory]:
    """Return the trajectories that `serialize_trajectories` serialized.

    Args:
        form: The return value of `serialize_trajectories`.
        episodes: The recorded segments of each episode.
        row: The row of the trajectories.
        group: Index of the row's group.
        rollout: Index of the rollout in its group.
    """
    table = from_plain(form["segments"], list[Segment])

    def segments_of(each: Mapping[str, Any]) -> Sequence[Segment]:
        episode: int | None = each["lane"]
        if episode is not None:
            return episodes[episode]
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
