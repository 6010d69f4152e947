"""Output of one trajectory, and its score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Self

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from agent_loop.errors import EpisodeError
from agent_loop.trajectory.attachments import Attachment
from agent_loop.trajectory.copying import copied
from agent_loop.trajectory.incidents import Failure, Feedback, Incident, Trace
from agent_loop.trajectory.segments import (
    UNKNOWN_VERSION,
    Segment,
    concatenated,
    count_turns,
    placed_attachments,
    segments_of_mask,
    without_forced,
)
from agent_loop.types import FloatArray, IntArray, Message, Origin, Row, StopReason, TokenIds


class AgentLoopMetrics(Struct, frozen=True):
    """Times and counts of one trajectory. The first three have the names of verl's metrics."""

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
    """Share of that time in which the event loop was blocked for more than 0.1 s at a time."""

    def model_dump(self) -> dict[str, float]:
        """Return the metrics by name."""
        return structs.asdict(self)


@dataclass(frozen=True, init=False, eq=False)
class AgentLoopOutput:
    """The record of one trajectory. Everything about its tokens is derived from `segments`."""

    segments: tuple[Segment, ...]
    """The prompt, then all further segments in order."""
    stop_reason: StopReason
    reward_score: float | None
    """The loop's or the tools' own reward; None leaves it to the reward function."""
    tool_schemas: tuple[Mapping[str, Any], ...]
    """OpenAI function schemas in the model's prompt."""
    messages: tuple[Message, ...]
    """The parsed conversation, for people and reward functions. Training uses the tokens."""
    metrics: AgentLoopMetrics
    feedback: tuple[Feedback, ...]
    """Results of each tool call and each reply of the interaction, in order."""
    incidents: tuple[Incident, ...]
    failure: Failure | None
    extra_fields: Mapping[str, Any]
    """Further values of the loop, which become columns of the batch."""
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
        weight_version: int = UNKNOWN_VERSION,
    ) -> None:
        """Give `segments`, or `prompt_ids`, `response_ids` and `response_mask` (1 = sampled by the model).

        With token lists, the worker fills in what is left out: `weight_version` and `response_logprobs` from the
        completions that the loop received, `messages` by decoding.

        Raises:
            EpisodeError: The lists do not agree in length, one does not hold token ids, or the mask holds something
                else than 0 and 1.
        """
        if segments is None:
            segments = segments_of_mask(
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                response_mask=response_mask,
                response_logprobs=response_logprobs,
                weight_version=weight_version,
            )
        elif not (
            prompt_ids is None
            and response_ids is None
            and response_mask is None
            and response_logprobs is None
        ):
            raise EpisodeError("AgentLoopOutput got segments and token lists; give one of the two")
        segments = tuple(segments)
        vars(self).update(
            segments=segments,
            stop_reason=stop_reason,
            reward_score=reward_score,
            messages=tuple(messages),
            tool_schemas=tuple(tool_schemas),
            metrics=metrics or AgentLoopMetrics(),
            feedback=tuple(feedback),
            incidents=tuple(incidents),
            failure=failure,
            extra_fields=dict(extra_fields or {}),
            num_turns=count_turns(segments) if num_turns is None else num_turns,
        )

    def failed(self, failure: Failure) -> AgentLoopOutput:
        """Return the same trajectory, ended by a failure."""
        return self._with(stop_reason=StopReason.FAILED, failure=failure)

    def measured(self, metrics: AgentLoopMetrics) -> AgentLoopOutput:
        """Return the same trajectory with other metrics."""
        return self._with(metrics=metrics)

    def noted(self, incident: Incident) -> AgentLoopOutput:
        """Return the same trajectory with one more incident."""
        return self._with(incidents=(*self.incidents, incident))

    def with_extra_fields(self, fields: Mapping[str, Any]) -> Self:
        """Return the same trajectory with more `extra_fields`."""
        return self._with(extra_fields={**self.extra_fields, **fields})

    def model_dump(self) -> dict[str, Any]:
        """Return the fields that verl's `AgentLoopOutput` documents, as plain values."""
        logprobs = self.response_logprobs
        return {
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "response_mask": self.response_mask.tolist(),
            "response_logprobs": None if logprobs is None else logprobs.tolist(),
            "reward_score": self.reward_score,
            "num_turns": self.num_turns,
            "metrics": self.metrics.model_dump(),
            "extra_fields": dict(self.extra_fields),
        }

    @cached_property
    def prompt_ids(self) -> IntArray:
        """Shape [prompt_tokens]."""
        return concatenated([s.token_ids for s in self.segments if s.origin is Origin.PROMPT], np.int32)

    @cached_property
    def response_ids(self) -> IntArray:
        """Shape [response_tokens]: tokens of the model, tools and interactions."""
        return concatenated([s.token_ids for s in self.response_segments], np.int32)

    @cached_property
    def response_mask(self) -> NDArray[np.int8]:
        """Shape [response_tokens]: 1 = sampled by the model, but 0 for tokens that a grammar forced."""
        sampled = self._per_response_token(lambda s: s.origin is Origin.MODEL, np.int8)
        return without_forced(sampled, self.response_segments)

    @cached_property
    def response_logprobs(self) -> FloatArray | None:
        """Shape [response_tokens], 0 where the mask is 0; None if any model segment has none."""
        if any(s.origin is Origin.MODEL and s.logprobs is None for s in self.response_segments):
            return None
        zeros = [
            np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in self.response_segments
        ]
        return concatenated(zeros, np.float32)

    @cached_property
    def attachments(self) -> tuple[Attachment, ...]:
        """All of them, counted from the first token of the prompt."""
        return placed_attachments(self.segments)

    @cached_property
    def weight_versions(self) -> IntArray:
        """Shape [response_tokens]: the version that sampled each token, -1 for tokens that no model sampled."""
        return self._per_response_token(
            lambda s: -1 if s.weight_version is None else s.weight_version, np.int32
        )

    @property
    def tool_rewards(self) -> tuple[float, ...]:
        """Rewards that `BaseTool.execute` returned, in the order of the calls."""
        return rewards_of(self.feedback, Origin.TOOL)

    @property
    def turn_scores(self) -> tuple[float, ...]:
        """Scores that the interaction returned, one per turn."""
        return rewards_of(self.feedback, Origin.INTERACTION)

    @property
    def response_segments(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.origin is not Origin.PROMPT)

    @property
    def num_model_tokens(self) -> int:
        """Number of sampled tokens, forced tokens included."""
        return sum([len(s) for s in self.segments if s.origin is Origin.MODEL])

    @property
    def num_assistant_turns(self) -> int:
        """A completion that spans a weight swap is one turn."""
        by_model = groupby(self.segments, key=lambda segment: segment.origin is Origin.MODEL)
        return sum(is_model for is_model, _ in by_model)

    @property
    def answer(self) -> str:
        """The text of the last assistant message; empty if there is none."""
        for message in reversed(self.messages):
            if message.get("role") == "assistant":
                return str(message.get("content") or "")
        return ""

    def with_only_extra_fields(self, extra_fields: Mapping[str, Any]) -> Self:
        """Return the same trajectory with these `extra_fields` and no others."""
        return self._with(extra_fields=extra_fields)

    def copied(self) -> Self:
        """Return the same trajectory with messages, schemas and fields of its own, for code that may change them."""
        return self._with(
            messages=tuple(copied(list(self.messages))),
            tool_schemas=tuple(copied(list(self.tool_schemas))),
            feedback=tuple(
                [f if not f.extra else structs.replace(f, extra=copied(f.extra)) for f in self.feedback]
            ),
            extra_fields=copied(self.extra_fields),
        )

    def _with(self, **changes: Any) -> Self:
        """Return a copy with other fields, faster than `dataclasses.replace`. Cached properties are copied too."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **changes)
        return copy

    def _per_response_token(self, value_of: Callable[[Segment], int], dtype: Any) -> NDArray[Any]:
        return concatenated([np.full(len(s), value_of(s), dtype) for s in self.response_segments], dtype)


def rewards_of(feedback: Iterable[Feedback], origin: Origin) -> tuple[float, ...]:
    """Return the rewards of tools, or the scores of the interaction, in order."""
    return tuple([f.reward for f in feedback if f.origin is origin and f.reward is not None])


class Trajectory(Struct, frozen=True, eq=False):
    """One scored rollout: its output, row and reward."""

    output: AgentLoopOutput
    row: Row
    group: int
    """Index of the prompt in the batch."""
    rollout: int
    """Index of the sample in the group."""
    reward: float | None
    """None if the trajectory failed, was cancelled or has no score. It is then not trained on."""
    reward_extra: Mapping[str, Any]
    """Further values that the reward function returned."""
    branch: int | None = None
    """Index of the output if the loop returned a list of outputs."""
    trace: Trace | None = None
    """None if there was no observer, as for trajectories from a journal."""

    def noted(self, incident: Incident) -> Trajectory:
        """Return the same trajectory with one more incident."""
        return structs.replace(self, output=self.output.noted(incident))

    @property
    def trajectory_id(self) -> str:
        suffix = "" if self.branch is None else f"/branch={self.branch}"
        return f"group={self.group}/rollout={self.rollout}{suffix}"
