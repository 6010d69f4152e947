"""What is kept of completions, replies and finished trajectories, as plain values and arrays, and how to read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import structs

from agent_loop.chat.multimodal import Encoded
from agent_loop.interactions.session import InteractionReply
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.results import ToolResult
from agent_loop.trajectory import (
    AgentLoopMetrics,
    AgentLoopOutput,
    Failure,
    Feedback,
    Incident,
    IncidentKind,
    Segment,
    Trajectory,
)
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import Message, Origin, Row, StopReason, TokenOutput, VersionSpan, as_token_ids


class LaneOf(Protocol):
    """Which episode's recorded tokens a trajectory's segments are; None if they are no episode's."""

    def __call__(self, segments: Sequence[Segment]) -> int | None: ...


def completion_form(output: TokenOutput) -> dict[str, Any]:
    return {
        "ids": as_token_ids(output.token_ids),
        "log_probs": None if output.log_probs is None else np.asarray(output.log_probs, np.float32),
        "stop": output.stop_reason,
        "version": output.weight_version,
        "preempted": output.num_preempted,
        "cached": output.num_cached_tokens,
        "spans": output.version_spans,
    }


def read_completion(form: Mapping[str, Any]) -> TokenOutput:
    log_probs = form["log_probs"]
    return TokenOutput(
        token_ids=form["ids"].tolist(),
        log_probs=None if log_probs is None else log_probs.tolist(),
        stop_reason=form["stop"],
        weight_version=form["version"],
        num_preempted=form["preempted"],
        num_cached_tokens=form["cached"],
        version_spans=tuple(VersionSpan(*span) for span in form["spans"]),
    )


def tokens_form(encoded: Encoded) -> dict[str, Any]:
    return {
        "ids": as_token_ids(encoded.token_ids),
        "attachments": [_attachment_form(attachment) for attachment in encoded.attachments],
    }


def read_tokens(form: Mapping[str, Any]) -> Encoded:
    return Encoded(form["ids"], tuple(_read_attachment(attachment) for attachment in form["attachments"]))


def tool_result_form(result: ToolResult) -> dict[str, Any]:
    response = result.response
    return {
        "text": response.text,
        "image": response.image,
        "video": response.video,
        "ends": response.ends_episode,
        "reward": result.reward,
        "incident": None if result.incident is None else _incident_form(result.incident),
        "extra": dict(result.extra),
    }


def read_tool_result(form: Mapping[str, Any]) -> ToolResult:
    return ToolResult(
        ToolResponse(form["text"], image=form["image"], video=form["video"], ends_episode=form["ends"]),
        reward=form["reward"],
        incident=None if form["incident"] is None else _read_incident(form["incident"]),
        extra=form["extra"],
    )


def reply_form(reply: InteractionReply) -> dict[str, Any]:
    return {
        "content": reply.content,
        "score": reply.score,
        "is_over": reply.is_over,
        "extra": dict(reply.extra),
    }


def read_reply(form: Mapping[str, Any]) -> InteractionReply:
    return InteractionReply(**form)


def trajectories_form(trajectories: Sequence[Trajectory], *, lane_of: LaneOf) -> dict[str, Any]:
    """The trajectories of one rollout. Tokens that the journal holds turn by turn are named, not written again."""
    lanes = [lane_of(trajectory.output.segments) for trajectory in trajectories]
    segments: dict[int, Segment] = {}
    if None in lanes:
        segments = {id(s): s for trajectory in trajectories for s in trajectory.output.segments}
    places = {key: place for place, key in enumerate(segments)}
    return {
        "segments": [_segment_form(segment) for segment in segments.values()],
        "trajectories": [
            {
                **_output_form(trajectory.output, prompt=trajectory.row["raw_prompt"]),
                "lane": None if segments else lane,
                "segments": [places[id(s)] for s in trajectory.output.segments] if segments else [],
                "reward": trajectory.reward,
                "reward_extra": dict(trajectory.reward_extra),
                "branch": trajectory.branch,
            }
            for trajectory, lane in zip(trajectories, lanes, strict=True)
        ],
    }


def read_trajectories(
    form: Mapping[str, Any], *, lanes: Mapping[int, Sequence[Segment]], row: Row, group: int, rollout: int
) -> list[Trajectory]:
    """Args: lanes: The recorded tokens of each episode."""
    table = [_read_segment(segment) for segment in form["segments"]]

    def segments_of(each: Mapping[str, Any]) -> Sequence[Segment]:
        lane: int | None = each["lane"]
        if lane is not None:
            return lanes[lane]
        places: list[int] = each["segments"]
        return [table[place] for place in places]

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


def verdict_form(trajectory: Trajectory) -> dict[str, Any]:
    """What a batch reward function found of a trajectory: its reward, or why there is none."""
    output, failure = trajectory.output, trajectory.output.failure
    return {
        "branch": trajectory.branch,
        "reward": trajectory.reward,
        "reward_extra": dict(trajectory.reward_extra),
        "failure": failure and [failure.error, failure.traceback],
        "incidents": [_incident_form(incident) for incident in output.incidents],
    }


def with_verdict(trajectory: Trajectory, form: Mapping[str, Any]) -> Trajectory:
    """Return a trajectory that had ended with what was found of it."""
    output = trajectory.output
    for incident in form["incidents"][len(output.incidents) :]:
        output = output.noted(_read_incident(incident))
    return structs.replace(
        trajectory,
        output=output.failed(Failure(*form["failure"])) if form["failure"] else output,
        reward=form["reward"],
        reward_extra=form["reward_extra"],
    )


def _output_form(output: AgentLoopOutput, *, prompt: Sequence[Message]) -> dict[str, Any]:
    messages = output.messages
    begins_with_row = len(messages) >= len(prompt) and all(
        mine is its for mine, its in zip(messages, prompt, strict=False)
    )
    return {
        "stop": str(output.stop_reason),
        "reward_score": output.reward_score,
        "tool_schemas": output.tool_schemas,
        "row_messages": len(prompt) if begins_with_row else 0,
        "messages": messages[len(prompt) :] if begins_with_row else messages,
        "metrics": structs.asdict(output.metrics),
        "feedback": [_feedback_form(feedback) for feedback in output.feedback],
        "incidents": [_incident_form(incident) for incident in output.incidents],
        "failure": output.failure and [output.failure.error, output.failure.traceback],
        "extra_fields": dict(output.extra_fields),
        "num_turns": output.num_turns,
    }


def _read_output(
    form: Mapping[str, Any], *, segments: Sequence[Segment], prompt: Sequence[Message]
) -> AgentLoopOutput:
    return AgentLoopOutput(
        segments=segments,
        stop_reason=StopReason(form["stop"]),
        reward_score=form["reward_score"],
        tool_schemas=form["tool_schemas"],
        messages=[*prompt[: form["row_messages"]], *form["messages"]],
        metrics=AgentLoopMetrics(**form["metrics"]),
        feedback=[_read_feedback(feedback) for feedback in form["feedback"]],
        incidents=[_read_incident(incident) for incident in form["incidents"]],
        failure=form["failure"] and Failure(*form["failure"]),
        extra_fields=form["extra_fields"],
        num_turns=form["num_turns"],
    )


def _segment_form(segment: Segment) -> dict[str, Any]:
    return {
        "ids": segment.token_ids,
        "origin": str(segment.origin),
        "log_probs": segment.log_probs,
        "version": segment.weight_version,
        "attachments": [_attachment_form(attachment) for attachment in segment.attachments],
    }


def _read_segment(form: Mapping[str, Any]) -> Segment:
    return Segment(
        form["ids"],
        Origin(form["origin"]),
        form["log_probs"],
        form["version"],
        tuple(_read_attachment(attachment) for attachment in form["attachments"]),
    )


def _attachment_form(attachment: Attachment) -> dict[str, Any]:
    form = {name: getattr(attachment, name) for name in Attachment.__slots__}
    return form | {"features": dict(attachment.features)}


def _read_attachment(form: Mapping[str, Any]) -> Attachment:
    return Attachment(**form)


def _feedback_form(feedback: Feedback) -> list[Any]:
    incident = None if feedback.incident is None else str(feedback.incident)
    return [
        str(feedback.origin),
        feedback.name,
        feedback.place,
        feedback.reward,
        incident,
        dict(feedback.extra),
    ]


def _read_feedback(form: Sequence[Any]) -> Feedback:
    origin, name, place, reward, incident, extra = form
    kind = None if incident is None else IncidentKind(incident)
    return Feedback(Origin(origin), name, place, reward, kind, extra)


def _incident_form(incident: Incident) -> list[Any]:
    return [str(incident.kind), incident.detail, incident.assistant_turn]


def _read_incident(form: Sequence[Any]) -> Incident:
    kind, detail, assistant_turn = form
    return Incident(IncidentKind(kind), detail, assistant_turn)
