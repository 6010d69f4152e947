"""Conversion of a trajectory to a stored row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from agent_loop.files.plain_values import without_halves
from agent_loop.storage.json_text import described, described_row, to_json
from agent_loop.storage.times import times_of
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import FloatArray, Origin


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Values per response token that training computed for one trajectory."""

    advantages: FloatArray | None = None
    """Shape [response_tokens]; None if the trajectory was not trained on."""
    train_logprobs: FloatArray | None = None
    """Shape [response_tokens]: the trainer's log-probs before the update; None if it computed none."""
    trained_mask: NDArray[np.bool_] | None = None
    """Shape [response_tokens]; None is the response mask. Tokens that branches share are trained on once."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Values that all rows of a file share."""

    step: int
    split: str
    weight_version: int | None
    success_threshold: float


def columns_of(trajectory: Trajectory, *, facts: StepFacts, learned: Learned | None = None) -> dict[str, Any]:
    """Return the value of each column of `storage.schema`."""
    learned = learned or Learned()
    return {
        **_who(trajectory, facts),
        **_result(trajectory, facts),
        **_compared(trajectory.output, facts, learned),
        **_time(trajectory),
        **_tokens(trajectory.output, learned),
        **_texts(trajectory),
    }


def _who(trajectory: Trajectory, facts: StepFacts) -> dict[str, Any]:
    agent_name = trajectory.row.get("agent_name")
    return {
        "step": facts.step,
        "split": facts.split,
        "trajectory_id": trajectory.trajectory_id,
        "group": trajectory.group,
        "rollout": trajectory.rollout,
        "branch": trajectory.branch,
        "agent_name": None if agent_name is None else str(agent_name),
        "row": to_json(described_row(trajectory.row)),
        "weight_version": facts.weight_version,
    }


def _result(trajectory: Trajectory, facts: StepFacts) -> dict[str, Any]:
    output, reward = trajectory.output, trajectory.reward
    failed = [f for f in output.feedback if f.origin is Origin.TOOL and f.incident is not None]
    return {
        "reward": reward,
        "reward_score": output.reward_score,
        "is_success": reward is not None and reward >= facts.success_threshold,
        "stop_reason": str(output.stop_reason),
        "failure": output.failure and without_halves(output.failure.error),
        "failure_traceback": output.failure and without_halves(output.failure.traceback),
        "failure_kind": output.failure and str(output.failure.kind),
        "num_turns": output.num_turns,
        "num_assistant_turns": output.num_assistant_turns,
        "num_tool_calls": output.metrics.num_tool_calls,
        "num_failed_calls": len(failed),
        "num_incidents": len(output.incidents),
        "prompt_length": len(output.prompt_ids),
        "response_length": len(output.response_ids),
        "num_model_tokens": output.num_model_tokens,
    }


def _compared(output: AgentLoopOutput, facts: StepFacts, learned: Learned) -> dict[str, Any]:
    """Return the columns that compare the trajectory with the trainer."""
    is_model = output.response_mask.astype(bool)
    is_trained = is_model if learned.trained_mask is None else learned.trained_mask & is_model
    values: dict[str, Any] = {}
    if learned.advantages is not None and is_trained.any():
        values["advantage"] = float(learned.advantages[is_trained].mean())
    if facts.weight_version is not None and is_model.any():
        values["staleness"] = facts.weight_version - int(output.weight_versions[is_model].min())
    if learned.train_logprobs is not None and output.response_logprobs is not None:
        difference = np.abs(learned.train_logprobs - output.response_logprobs)[is_model]
        if difference.size:
            values["logprob_diff_max"] = float(difference.max())
            values["logprob_diff_mean"] = float(difference.mean())
    return values


def _time(trajectory: Trajectory) -> dict[str, Any]:
    trace = trajectory.trace
    if trace is None:
        return {}
    return {"began_at": trace.began_at, "seconds": trace.seconds, **asdict(times_of(trace))}


def _tokens(output: AgentLoopOutput, learned: Learned) -> dict[str, Any]:
    return {
        "prompt_ids": output.prompt_ids,
        "response_ids": output.response_ids,
        "response_mask": output.response_mask,
        "response_logprobs": _logprobs(output),
        "weight_versions": output.weight_versions,
        "advantages": learned.advantages,
        "train_logprobs": learned.train_logprobs,
        "segments": [
            {"origin": str(s.origin), "num_tokens": len(s), "weight_version": s.weight_version}
            for s in output.segments
        ],
        "extras": _extras(output),
    }


def _extras(output: AgentLoopOutput) -> list[dict[str, Any]] | None:
    """Return one entry for each array of each segment; None if there are no arrays."""
    arrays = [
        {
            "segment": number,
            "name": name,
            "dtype": array.dtype.str,
            "shape": array.shape,
            "data": array.tobytes(),
        }
        for number, segment in enumerate(output.segments)
        for name, array in segment.extras.items()
    ]
    return arrays or None


def _logprobs(output: AgentLoopOutput) -> FloatArray | list[float | None] | None:
    """Return log-probs, with None for each token of a model segment that has none, or None if no segment has any."""
    if output.response_logprobs is not None:
        return output.response_logprobs
    by_model = [s for s in output.segments if s.origin is Origin.MODEL]
    if all(s.logprobs is None for s in by_model):
        return None
    values: list[float | None] = []
    for segment in output.response_segments:
        if segment.logprobs is not None:
            values += segment.logprobs.tolist()
        else:
            values += [None if segment.origin is Origin.MODEL else 0.0] * len(segment)
    return values


def _texts(trajectory: Trajectory) -> dict[str, Any]:
    output, trace = trajectory.output, trajectory.trace
    spans = trace and [[s.kind, s.name, s.start, s.end, s.details] for s in trace.spans]
    return {
        "messages": to_json(described(output.messages)),
        "tool_schemas": to_json(output.tool_schemas),
        "answer": without_halves(output.answer),
        "feedback": to_json([structs.asdict(feedback) for feedback in output.feedback]),
        "incidents": to_json([structs.asdict(incident) for incident in output.incidents]),
        "spans": None if spans is None else to_json(spans),
        "metrics": to_json(structs.asdict(output.metrics)),
        "reward_extra": to_json(trajectory.reward_extra),
        "extra_fields": to_json(output.extra_fields),
    }
