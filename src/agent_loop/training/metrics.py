"""Names of all training metrics, the metrics of a rollout, and the writer of the metrics file."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import OutputError
from agent_loop.runtime.describe import describe_error
from agent_loop.storage.metrics_file import read_metrics
from agent_loop.storage.whole_file import whole_file
from agent_loop.tracing.delivery import Delivery
from agent_loop.training.drift import find_drift
from agent_loop.training.loggers import LOGGER_TIMEOUT_S, Scalars
from agent_loop.trajectory import (
    AgentLoopOutput,
    IncidentKind,
    Trajectory,
    branch_weights,
    group_branches,
    mean_reward,
)

STEP = "step"
"""Completed steps; the key of a line."""

REWARD_MEAN = "reward/mean"
"""Over scored rollouts; the reward of one with branches is the mean of theirs."""
REWARD_MIN = "reward/min"
REWARD_MAX = "reward/max"
SUCCESS_SHARE = "reward/success_share"
"""Share of rollouts of which a branch has at least `reward.success_threshold`."""
SIGNAL_SHARE = "reward/signal_share"
"""Share of rollouts that can be told from what they are compared with: where that is their group, it has two different
rewards; else they are scored."""
KL_TO_REFERENCE = "reward/kl"
"""Mean over tokens of what `algorithm.kl_reward_coef` weighs."""
ADVANTAGE_MEAN = "reward/advantage_mean"
"""Over the model's tokens in the rows that are trained."""
ADVANTAGE_STD = "reward/advantage_std"

NUM_TURNS_MEAN = "rollout/num_turns/mean"
PROMPT_LENGTH_MEAN = "rollout/prompt_length/mean"
RESPONSE_LENGTH_MEAN = "rollout/response_length/mean"
RESPONSE_LENGTH_MAX = "rollout/response_length/max"
MODEL_TOKENS = "rollout/model_tokens"
TOOL_CALLS_MEAN = "rollout/num_tool_calls/mean"
UNSCORED_SHARE = "rollout/unscored_share"
"""Share of rollouts of which nothing scored any branch."""
MALFORMED_CALL_SHARE = "rollout/malformed_call_share"
"""Of all calls that were written."""
INVALID_TURN_SHARE = "rollout/invalid_turn_share"
"""Of all assistant turns; in an invalid one there is nothing but malformed calls."""
TEMPLATE_EXACT_SHARE = "rollout/template_exact_share"
"""Of a sample of trajectories: those whose tokens a full render of their messages would give again."""
TEMPLATE_DRIFT = "rollout/template_drift/"
"""Prefix: the same for those that it would not, by cause."""
STALENESS_MAX = "rollout/staleness/max"
"""Steps between the oldest weights that sampled a token and those that the step began with."""
STALENESS_MEAN = "rollout/staleness/mean"
"""The same, mean over sampled tokens."""
DROPPED_GROUPS = "rollout/dropped_groups"
"""Groups without variance whose places others took."""
STOP_REASON = "rollout/stop_reason/"
"""Prefix: share of rollouts that ended so; the branches of a rollout share its weight."""
INCIDENT = "rollout/incidents/"
"""Prefix: number of such incidents per rollout; of one with branches, their mean."""

TOOLS = "tools/"
"""Prefix: per tool, its calls per rollout, the share of them that did not work, and means of what they returned."""

ACTOR = "actor/"
"""Prefix of the metrics of a policy loss."""
LOSS = "actor/loss"
PPO_KL = "actor/ppo_kl"
CLIP_FRACTION = "actor/clip_fraction"
DUAL_CLIP_FRACTION = "actor/dual_clip_fraction"
ENTROPY = "actor/entropy"
KL_LOSS = "actor/kl_loss"
GRAD_NORM = "actor/grad_norm"
LEARNING_RATE = "actor/lr"
ROWS_TRAINED = "actor/rows_trained"
OPTIMIZER_STEPS = "actor/optimizer_steps"
NONFINITE_UPDATES = "actor/nonfinite_updates"
"""Optimiser steps left out because the gradient was infinite or NaN."""
SKIPPED_UPDATE = "actor/skipped_update"
"""1 where no row carried a signal and the weights stayed as they were."""
LOGPROB_DIFF_MAX = "actor/rollout_train_logprob_diff_max"
LOGPROB_DIFF_MEAN = "actor/rollout_train_logprob_diff_mean"
MISMATCH_K1 = "actor/rollout_train_kl_k1"
"""KL divergence of the trainer's probabilities from the rollout's, under the same weights, by the estimator `k1`."""
MISMATCH_K3 = "actor/rollout_train_kl_k3"
TRUNCATED_SHARE = "actor/correction_truncated_share"
"""Share of tokens whose importance weight was cut at `actor.correction.max_ratio`."""
MASKED_SHARE = "actor/correction_masked_share"
"""Share of tokens that `actor.correction` left out."""
CORRECTION_WEIGHT_MEAN = "actor/correction_weight_mean"

CRITIC_LOSS = "critic/loss"
CRITIC_CLIP_FRACTION = "critic/clip_fraction"
CRITIC_GRAD_NORM = "critic/grad_norm"
CRITIC_LEARNING_RATE = "critic/lr"
CRITIC_OPTIMIZER_STEPS = "critic/optimizer_steps"
CRITIC_NONFINITE_UPDATES = "critic/nonfinite_updates"
VALUE_MEAN = "critic/value_mean"
"""Over the model's tokens, before the update."""
RETURN_MEAN = "critic/return_mean"
EXPLAINED_VARIANCE = "critic/explained_variance"
"""1 - var(return - value) / var(return): 1 where the critic knew all, 0 where it knew nothing; absent where all returns
are equal."""

SECONDS = "timing_s/"
"""Prefix: seconds of each phase."""
STEP_SECONDS = "timing_s/step"
TOKENS_PER_SECOND = "perf/model_tokens_per_s"
"""Sampled tokens per second of rollout."""
TIME = "time/"
"""Prefix: what the time of a step went to, as shares that sum to 1; `training/time_shares.py` says how."""
TIME_QUEUE = "time/queue"
"""Of the rollout: trajectories held back by `rollout.max_concurrent`, or waiting for a place at a server."""
TIME_PREFILL = "time/prefill"
"""Of the rollout: from a request's start to its first token, where the server says it."""
TIME_DECODE = "time/decode"
"""Of the rollout: the rest of the completions; all of them where no server said when its first token came."""
TIME_TOOLS = "time/tools"
"""Of the rollout: tools and interactions."""
TIME_REWARD = "time/reward"
"""Of the rollout: scoring."""
TIME_OTHER = "time/other"
"""Of the rollout: encoding, closing, journal, the loops' own code; and what was not watched."""
TIME_TRAINING = "time/training"
"""Advantages and update."""
TIME_WEIGHTS = "time/weights"
"""Bringing the new weights to the servers."""
TIME_VALIDATION = "time/validation"
"""Rolling out the validation rows."""
TIME_IDLE = "time/idle"
"""Of the rollout: trajectories that had ended while the slowest ran. Of the step: what is in no phase."""
SLOWEST_SECONDS = "time/slowest_s"
"""Seconds of the trajectory that took longest; no share."""
UNSTORED_FILES = "storage/failed_writes"
"""Files of trajectories that could not be written, since the run began."""
VALIDATION = "val/"
"""Prefix: what evaluation measured."""
MAX_DRIFT_SAMPLE = 16
"""Number of compared trajectories. A comparison costs a render and an encoding of the whole conversation."""


def rollout_metrics(
    trajectories: Sequence[Trajectory], *, success_threshold: float, weight_version: int
) -> dict[str, float]:
    """Return the metrics of a batch of trajectories; empty for an empty batch.

    Means and shares are over rollouts, whose branches share their weight. A rollout's reward is the mean of its
    branches' rewards; it is a success if any branch is.
    """
    if not trajectories:
        return {}
    outputs = [t.output for t in trajectories]
    weights, rollouts = branch_weights(trajectories), group_branches(trajectories)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    means = [reward for branches in rollouts if (reward := mean_reward(branches)) is not None]
    successes = [
        any(t.reward is not None and t.reward >= success_threshold for t in branches) for branches in rollouts
    ]
    sampled = [
        (s.weight_version, len(s)) for o in outputs for s in o.segments if s.weight_version is not None
    ]
    num_sampled = sum(length for _, length in sampled)
    lag = sum((weight_version - version) * length for version, length in sampled)
    response_lengths = [len(o.response_ids) for o in outputs]

    def mean(values: Sequence[float]) -> float:
        return float(np.dot(values, weights)) / len(rollouts)

    metrics = {
        SUCCESS_SHARE: sum(successes) / len(rollouts),
        UNSCORED_SHARE: 1 - len(means) / len(rollouts),
        NUM_TURNS_MEAN: mean([o.num_turns for o in outputs]),
        PROMPT_LENGTH_MEAN: mean([len(o.prompt_ids) for o in outputs]),
        RESPONSE_LENGTH_MEAN: mean(response_lengths),
        RESPONSE_LENGTH_MAX: float(max(response_lengths)),
        MODEL_TOKENS: float(sum(int(o.response_mask.sum()) for o in outputs)),
        TOOL_CALLS_MEAN: mean([o.metrics.num_tool_calls for o in outputs]),
        STALENESS_MAX: float(
            weight_version - min((version for version, _ in sampled), default=weight_version)
        ),
        STALENESS_MEAN: lag / max(num_sampled, 1),
    }
    metrics |= _call_metrics(outputs, weights=weights)
    if rewards:
        metrics |= {REWARD_MEAN: float(np.mean(means)), REWARD_MIN: min(rewards), REWARD_MAX: max(rewards)}
    counts: defaultdict[str, float] = defaultdict(float)
    for output, weight in zip(outputs, weights, strict=True):
        counts[f"{STOP_REASON}{output.stop_reason.value}"] += weight
        for incident in output.incidents:
            counts[f"{INCIDENT}{incident.kind.value}"] += weight
    return metrics | {name: count / len(rollouts) for name, count in counts.items()}


def _call_metrics(outputs: Sequence[AgentLoopOutput], *, weights: Sequence[float]) -> dict[str, float]:
    kinds: defaultdict[IncidentKind, float] = defaultdict(float)
    num_calls = num_turns = 0.0
    for output, weight in zip(outputs, weights, strict=True):
        for incident in output.incidents:
            kinds[incident.kind] += weight
        num_calls += weight * output.metrics.num_tool_calls
        num_turns += weight * output.num_assistant_turns
    malformed = kinds[IncidentKind.MALFORMED_CALL]
    return {
        MALFORMED_CALL_SHARE: _share(malformed, of=malformed + num_calls),
        INVALID_TURN_SHARE: _share(kinds[IncidentKind.INVALID_TURN], of=num_turns),
    }


def _share(part: float, *, of: float) -> float:
    return part / of if of else 0.0


def drift_metrics(trajectories: Sequence[Trajectory], *, template: ChatTemplate) -> dict[str, float]:
    """Return the share of a sample of trajectories that a full render reproduces; empty if none can be compared."""
    comparable = [
        t.output
        for t in trajectories
        if t.rollout == 0 and t.output.messages and not any(s.attachments for s in t.output.segments)
    ]
    causes = [find_drift(output, template=template) for output in comparable[:MAX_DRIFT_SAMPLE]]
    if not causes:
        return {}
    counts = Counter(causes)
    shares = {f"{TEMPLATE_DRIFT}{cause}": n / len(causes) for cause, n in counts.items() if cause is not None}
    return {TEMPLATE_EXACT_SHARE: counts[None] / len(causes), **shares}


class MetricsWriter:
    """Writer of one JSON object per step to a file, and to loggers.

    Values that are not finite become null in the file, and are not passed to loggers.
    """

    def __init__(self, path: Path, *, loggers: Sequence[Delivery[Scalars]] = ()) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._loggers = loggers

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line and flush it to the operating system.

        Raises:
            OutputError: The file cannot be written.
        """
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            self._file.write(json.dumps({STEP: step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"the metrics {self._file.name!r} cannot be written ({describe_error(error)}); free the disk, then "
                "resume"
            ) from error
        for logger in self._loggers:
            logger.put(Scalars(step, {name: value for name, value in values.items() if value is not None}))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # flushing a line that could not be written raises again
            self._file.close()
        for logger in self._loggers:
            logger.close(timeout_s=LOGGER_TIMEOUT_S)


def forget_steps_after(path: Path, *, step: int) -> None:
    """Remove the lines of later steps from a metrics file, because a resumed run writes them again."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line[STEP] <= step]
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
