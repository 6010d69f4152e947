"""The record of a trajectory: segments, and everything that is derived from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.attachments import Attachment
from agent_loop.errors import EpisodeError
from agent_loop.types import FloatArray, IntArray, Message, Origin, Row, StopReason, TokenIds, as_token_ids


class IncidentKind(StrEnum):
    """What went wrong, or was left out, on a trajectory that went on or ended in good order."""

    MALFORMED_CALL = "malformed_call"
    INVALID_TURN = "invalid_turn"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    TOOL_UNAVAILABLE = "tool_unavailable"
    UNEXECUTED_CALL = "unexecuted_call"
    TRUNCATED_REPLY = "truncated_reply"
    DROPPED_OBSERVATION = "dropped_observation"
    CUT_TURN = "cut_turn"
    TRUNCATED_PROMPT = "truncated_prompt"
    CLOSE_FAILED = "close_failed"
    INTERRUPTED_CALL = "interrupted_call"
    RESTARTED = "restarted"
    GENERATE_TIMEOUT = "generate_timeout"
    TURN_TIMEOUT = "turn_timeout"
    FAILED_REQUEST = "failed_request"


@dataclass(frozen=True, slots=True)
class Incident:
    """One named loss."""

    kind: IncidentKind
    detail: str
    """One line for a person to read."""
    assistant_turn: int = 0
    """How many assistant turns there had been."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a call of a tool, or a reply of the interaction, brought the turn that asked for it, beside its words."""

    origin: Origin
    """`TOOL` or `INTERACTION`."""
    name: str = ""
    """The tool's."""
    place: int | None = None
    """Where in the response the turn's last token is; None where the model had said nothing yet."""
    reward: float | None = None
    incident: IncidentKind | None = None
    """Why the call did not work, where it did not."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the tool or the interaction returned."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ended a trajectory with `StopReason.FAILED`."""

    error: str
    """Type and message, on one line: the key by which failures are counted."""
    traceback: str


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens with one origin; for the model's, also with one weight version."""

    token_ids: IntArray
    """Shape [num_tokens]."""
    origin: Origin
    log_probs: FloatArray | None = None
    """Shape [num_tokens]; model segments only, None where the server gives none."""
    weight_version: int | None = None
    """Model segments only."""
    attachments: tuple[Attachment, ...] = ()
    """In the order of their tokens, which do not overlap; never the model's."""

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise EpisodeError(f"{len(self.token_ids)} token ids but {len(self.log_probs)} log-probs")
        if (self.weight_version is not None) != (self.origin is Origin.MODEL):
            raise EpisodeError(
                f"{self.origin} segment with weight version {self.weight_version}: "
                "model segments, and only those, carry one"
            )
        if self.attachments:
            _check_attachments(self)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class AgentLoopMetrics:
    """Where the time of one trajectory went. The first three are the names under which they are reported."""

    generate_sequences: float = 0.0
    """Seconds spent waiting for completions."""
    tool_calls: float = 0.0
    """Seconds spent in tools and interactions."""
    num_preempted: int = 0
    total: float = 0.0
    """Seconds from the episode's start to its end."""
    num_tool_calls: int = 0
    event_loop_lag_max: float = 0.0
    """Seconds by which the event loop's timers were late at most, from the rollout's start to the trajectory's end."""
    event_loop_lag_mean: float = 0.0
    event_loop_late_share: float = 0.0
    """Of that time, in which the event loop was held up for more than 0.1 s at once."""


@dataclass(frozen=True, init=False, eq=False)
class AgentLoopOutput:
    """The record of one trajectory. Everything about its tokens is derived from `segments`."""

    segments: tuple[Segment, ...]
    """Prompt first, then what was said, in order."""
    stop_reason: StopReason
    reward_score: float | None
    """The loop's or the tools' own reward; None leaves it to the reward function."""
    tool_schemas: tuple[Mapping[str, Any], ...]
    """The OpenAI function schemas that the model was shown."""
    messages: tuple[Message, ...]
    """The conversation as it was read, for people and reward functions; tokens are the truth."""
    metrics: AgentLoopMetrics
    feedback: tuple[Feedback, ...]
    """What each call and each reply of the interaction brought, in order."""
    incidents: tuple[Incident, ...]
    failure: Failure | None
    extra_fields: Mapping[str, Any]
    """Whatever else the loop wants to hand on; becomes columns of the batch."""
    num_turns: int
    """Prompt, assistant turns and replies, each counted once."""

    def __init__(
        self,
        *,
        segments: Iterable[Segment] | None = None,
        prompt_ids: TokenIds | None = None,
        response_ids: TokenIds | None = None,
        response_mask: TokenIds | None = None,
        response_logprobs: Sequence[float] | FloatArray | None = None,
        num_turns: int | None = None,
        stop_reason: StopReason = StopReason.ANSWERED,
        reward_score: float | None = None,
        messages: Iterable[Message] = (),
        tool_schemas: Iterable[Mapping[str, Any]] = (),
        metrics: AgentLoopMetrics | None = None,
        feedback: Iterable[Feedback] = (),
        incidents: Iterable[Incident] = (),
        failure: Failure | None = None,
        extra_fields: Mapping[str, Any] | None = None,
        weight_version: int = 0,
    ) -> None:
        """Give `segments`, or `prompt_ids`, `response_ids` and `response_mask` (1 = the model said it).

        Raises:
            EpisodeError: The lists do not agree in length, or the mask holds something else than 0 and 1.
        """
        if segments is None:
            segments = _segments_of_mask(
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                response_mask=response_mask,
                response_logprobs=response_logprobs,
                weight_version=weight_version,
            )
        elif any(given is not None for given in (prompt_ids, response_ids, response_mask, response_logprobs)):
            raise EpisodeError("AgentLoopOutput got segments and token lists; give one of the two")
        segments = tuple(segments)
        values: dict[str, Any] = {
            "segments": segments,
            "stop_reason": stop_reason,
            "reward_score": reward_score,
            "messages": tuple(messages),
            "tool_schemas": tuple(tool_schemas),
            "metrics": metrics or AgentLoopMetrics(),
            "feedback": tuple(feedback),
            "incidents": tuple(incidents),
            "failure": failure,
            "extra_fields": dict(extra_fields or {}),
            "num_turns": count_turns(segments) if num_turns is None else num_turns,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def failed(self, failure: Failure) -> AgentLoopOutput:
        """The same trajectory, ended by a failure."""
        return self._with(stop_reason=StopReason.FAILED, failure=failure)

    def measured(self, metrics: AgentLoopMetrics) -> AgentLoopOutput:
        """The same trajectory with other metrics."""
        return self._with(metrics=metrics)

    def noted(self, incident: Incident) -> AgentLoopOutput:
        """The same trajectory with one more named loss."""
        return self._with(incidents=(*self.incidents, incident))

    @cached_property
    def prompt_ids(self) -> IntArray:
        """Shape [prompt_tokens]."""
        return _concatenate([s.token_ids for s in self.segments if s.origin is Origin.PROMPT], np.int32)

    @cached_property
    def response_ids(self) -> IntArray:
        """Shape [response_tokens]: what the model, tools and interactions said."""
        return _concatenate([s.token_ids for s in self.response_segments], np.int32)

    @cached_property
    def response_mask(self) -> NDArray[np.int8]:
        """Shape [response_tokens]: 1 = the model said it."""
        return self._per_response_token(lambda s: s.origin is Origin.MODEL, np.int8)

    @cached_property
    def response_logprobs(self) -> FloatArray | None:
        """Shape [response_tokens], 0 where the mask is 0; None if any model segment has none."""
        if any(s.origin is Origin.MODEL and s.log_probs is None for s in self.response_segments):
            return None
        zeros = [
            np.zeros(len(s), np.float32) if s.log_probs is None else s.log_probs
            for s in self.response_segments
        ]
        return _concatenate(zeros, np.float32)

    @cached_property
    def attachments(self) -> tuple[Attachment, ...]:
        """All of them, counted from the first token of the prompt."""
        return placed_attachments(self.segments)

    @cached_property
    def weight_versions(self) -> IntArray:
        """Shape [response_tokens]: the version that sampled each token, -1 where the mask is 0."""
        return self._per_response_token(
            lambda s: -1 if s.weight_version is None else s.weight_version, np.int32
        )

    @property
    def tool_rewards(self) -> tuple[float, ...]:
        """Rewards that `BaseTool.execute` returned, in the order of the calls."""
        return tuple(f.reward for f in self.feedback if f.origin is Origin.TOOL and f.reward is not None)

    @property
    def turn_scores(self) -> tuple[float, ...]:
        """Scores that the interaction returned, one per turn."""
        return tuple(
            f.reward for f in self.feedback if f.origin is Origin.INTERACTION and f.reward is not None
        )

    @property
    def response_segments(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.origin is not Origin.PROMPT)

    @property
    def num_assistant_turns(self) -> int:
        """A completion that spans a weight swap is one turn."""
        by_model = groupby(self.segments, key=lambda segment: segment.origin is Origin.MODEL)
        return sum(is_model for is_model, _ in by_model)

    @property
    def answer(self) -> str:
        """The text of the last assistant message; empty if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message.get("content") or "")
        return ""

    def _with(self, **changed: Any) -> AgentLoopOutput:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return AgentLoopOutput(**(values | changed))

    def _per_response_token(self, value_of: Callable[[Segment], int], dtype: Any) -> NDArray[Any]:
        return _concatenate([np.full(len(s), value_of(s), dtype) for s in self.response_segments], dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One scored rollout: what came out, of which row, and what it was worth."""

    output: AgentLoopOutput
    row: Row
    group: int
    """Which prompt of the batch."""
    rollout: int
    """Which of the group's samples."""
    reward: float | None
    """None where the trajectory failed or was cancelled, or nothing scores it: it is not trained on."""
    reward_extra: Mapping[str, Any]
    """What else the reward function returned."""
    branch: int | None = None
    """Which output, where the loop returned a list of them."""

    @property
    def trajectory_id(self) -> str:
        suffix = "" if self.branch is None else f"/branch={self.branch}"
        return f"group={self.group}/rollout={self.rollout}{suffix}"


def count_turns(segments: Iterable[Segment]) -> int:
    """Prompt, assistant turns and replies; a completion that spans a weight swap is one turn."""
    return sum(
        1 for _ in groupby(segments, key=lambda s: (s.origin is Origin.PROMPT, s.origin is Origin.MODEL))
    )


def placed_attachments(segments: Iterable[Segment]) -> tuple[Attachment, ...]:
    """The attachments of all segments, counted from the first token of the first."""
    segments = tuple(segments)
    starts = accumulate(map(len, segments), initial=0)
    return tuple(a.moved(start) for start, s in zip(starts, segments, strict=False) for a in s.attachments)


def _check_attachments(segment: Segment) -> None:
    """Raises: EpisodeError: A run is not where the tokens are."""
    end = 0
    for attachment in segment.attachments:
        kind, run = attachment.kind, segment.token_ids[attachment.start : attachment.end]
        if segment.origin is Origin.MODEL:
            raise EpisodeError(
                f"a model segment with an {kind}: models write tokens; attach it to a prompt or a reply"
            )
        if attachment.start < end or attachment.end > len(segment):
            raise EpisodeError(
                f"an {kind} at tokens {attachment.start} to {attachment.end} of a segment with {len(segment)} tokens, "
                f"of which {end} are taken; give attachments in order, each with a run of its own"
            )
        if attachment.placeholder_id not in run:
            raise EpisodeError(
                f"an {kind} at tokens {attachment.start} to {attachment.end} that hold no placeholder "
                f"{attachment.placeholder_id}; let the chat template write both"
            )
        end = attachment.end


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    joined = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    joined.flags.writeable = False
    return joined


def _segments_of_mask(
    *,
    prompt_ids: TokenIds | None,
    response_ids: TokenIds | None,
    response_mask: TokenIds | None,
    response_logprobs: Sequence[float] | FloatArray | None,
    weight_version: int,
) -> list[Segment]:
    if prompt_ids is None or response_ids is None or response_mask is None:
        raise EpisodeError("AgentLoopOutput needs segments, or prompt_ids, response_ids and response_mask")
    ids, mask = as_token_ids(response_ids), np.asarray(response_mask)
    if len(ids) != len(mask):
        raise EpisodeError(
            f"response_ids has {len(ids)} tokens but response_mask has {len(mask)}; they go together, one by one"
        )
    if not np.isin(mask, (0, 1)).all():
        raise EpisodeError("response_mask holds something else than 0 and 1")
    log_probs = None if response_logprobs is None else np.asarray(response_logprobs, dtype=np.float32)
    if log_probs is not None and len(log_probs) != len(ids):
        raise EpisodeError(f"response_ids has {len(ids)} tokens but response_logprobs has {len(log_probs)}")
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)] if len(ids) else [0]
    segments = [Segment(as_token_ids(prompt_ids), Origin.PROMPT)]
    for start, end in pairwise(cuts):
        if mask[start]:
            run_log_probs = None if log_probs is None else log_probs[start:end]
            segments.append(Segment(ids[start:end], Origin.MODEL, run_log_probs, weight_version))
        else:
            segments.append(Segment(ids[start:end], Origin.TOOL))
    return segments
