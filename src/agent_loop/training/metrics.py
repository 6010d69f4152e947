"""Names of all training metrics, and the writer of the metrics file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agent_loop.errors import OutputError
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.runtime.describe import describe_error
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.metrics_file import read_metrics
from agent_loop.training.loggers import LOGGER_TIMEOUT_S, Scalars

STEP = "step"
"""Number of completed steps; the key of a line."""

REWARD_MEAN = "reward/mean"
"""Mean reward over scored rollouts. The reward of a rollout with several branches is the mean of their rewards."""
SEAT_REWARD = "reward/seat_"
"""Prefix: mean reward over scored rollouts of one seat of a game, as in `reward/seat_0/mean`."""
REWARD_MIN = "reward/min"
"""Smallest reward of a branch."""
REWARD_MAX = "reward/max"
"""Largest reward of a branch."""
REWARD_PART = "reward/part/"
"""Prefix: mean over rollouts of each number that the reward function returned beside the reward, such as a part of
`reward.functions` or a criterion of a judge, as in `reward/part/format/mean`."""
SUCCESS_SHARE = "reward/success_share"
"""Share of rollouts in which the reward of a branch is at least `reward.success_threshold`."""
SIGNAL_SHARE = "reward/signal_share"
"""Share of rollouts that an estimator can learn from: scored, and with two different rewards in their group if the
estimator compares within groups."""
KL_TO_REFERENCE = "reward/kl"
"""Divergence that `algorithm.kl_reward_coef` multiplies; mean over tokens."""
ADVANTAGE_MEAN = "reward/advantage_mean"
"""Mean advantage over the sampled tokens of trained rows."""
ADVANTAGE_STD = "reward/advantage_std"
"""Standard deviation of the advantages over the sampled tokens of trained rows."""

NUM_TURNS_MEAN = "rollout/num_turns/mean"
"""Mean number of turns: prompt, completions and replies."""
PROMPT_LENGTH_MEAN = "rollout/prompt_length/mean"
"""Mean number of prompt tokens."""
RESPONSE_LENGTH_MEAN = "rollout/response_length/mean"
"""Mean number of tokens after the prompt, sampled or not."""
RESPONSE_LENGTH_MAX = "rollout/response_length/max"
"""Largest number of tokens after the prompt."""
MODEL_TOKENS = "rollout/model_tokens"
"""Number of sampled tokens of the step."""
TOOL_CALLS_MEAN = "rollout/num_tool_calls/mean"
"""Mean number of tool calls that could be parsed."""
UNSCORED_SHARE = "rollout/unscored_share"
"""Share of rollouts without a scored branch."""
MALFORMED_CALL_SHARE = "rollout/malformed_call_share"
"""Share of malformed calls among all calls."""
INVALID_TURN_SHARE = "rollout/invalid_turn_share"
"""Share of assistant turns whose calls are all malformed."""
STALENESS_MAX = "rollout/staleness/max"
"""Largest number of steps between the weights that sampled a token and the weights at the start of the step."""
STALENESS_MEAN = "rollout/staleness/mean"
"""Mean number of steps between the weights that sampled a token and the weights at the start of the step."""
DROPPED_GROUPS = "rollout/dropped_groups"
"""Number of groups without variance that were replaced by other groups."""
ROWS_SEEN = "rows/seen"
"""Number of rows with a result, when the rows of this step were selected."""
ROWS_SUCCESS = "rows/success"
"""Mean estimated success of the rows with a result (`data.sampler`), when the rows of this step were selected."""
ROWS_SKIPPED_SHARE = "rows/skipped_share"
"""Share of rows that `data.sampler.skip_solved` and `skip_failed` skip."""
REPLAYED_GROUPS = "rows/replayed_groups"
"""Number of groups of earlier steps that were trained again. Absent without `data.sampler.replay_share`."""
REPLAYED_TOKENS = "rows/replayed_tokens"
"""Number of sampled tokens in replayed groups, which no other metric of the rollout counts."""
REPLAYED_AGE_MAX = "rows/replayed_age/max"
"""Largest age of a replayed token in weight versions, at most `data.sampler.replay_max_age`."""
STOP_REASON = "rollout/stop_reason/"
"""Prefix: share of rollouts by stop reason. The branches of a rollout share its weight."""
FAILURES = "rollout/failures/"
"""Prefix: number of rollouts that failed, by what failed: `code`, or a part of the infrastructure."""
RETRIES = "rollout/retries"
"""Number of times that a trajectory or its reward ran again after a failure of infrastructure."""
INCIDENT = "rollout/incidents/"
"""Prefix: mean number of incidents per rollout, by kind. The branches of a rollout share its weight."""

FORK_STATES = "forks/states"
"""Number of states from which `algorithm.fork` continued trajectories anew."""
FORK_CONTINUATIONS = "forks/continuations"
"""Number of continuations. They are no rollouts, and count in no other metric of rollouts."""
FORK_LOST_SHARE = "forks/lost_share"
"""Share of the continuations that were not scored, or did not reach the state that they were to continue from."""
FORK_TOKENS = "forks/model_tokens"
"""Number of tokens that were sampled for continuations. Replayed tokens do not count."""

TOOLS = "tools/"
"""Prefix: per tool, calls per rollout, the share of failed calls, and means of rewards and of the numbers that calls
returned."""

BY_SOURCE = "by_source/"
"""Prefix: `rollouts`, `reward/mean` and `reward/success_share` of each data source, as in
`by_source/gsm8k/reward/mean`, for the first 20 sources. Absent in runs with one source."""

ACTOR = "actor/"
"""Prefix: metrics of a policy loss."""
LOSS = "actor/loss"
"""Policy loss with the terms of entropy and KL; mean over the optimiser steps."""
PPO_KL = "actor/ppo_kl"
"""Mean of old log-prob minus new log-prob."""
CLIP_FRACTION = "actor/clip_fraction"
"""Share of tokens whose gradient PPO's clip removed."""
DUAL_CLIP_FRACTION = "actor/dual_clip_fraction"
"""Share of tokens whose gradient the dual clip removed."""
ENTROPY = "actor/entropy"
"""Entropy of the policy at sampled tokens."""
KL_LOSS = "actor/kl_loss"
"""Divergence that `actor.kl_loss_coef` multiplies."""
OBSERVATION_LOSS = "actor/observation_loss"
"""Mean cross-entropy of the observations, in nats, which `actor.observation_coeff` multiplies."""
DISTILLATION_LOSS = "actor/distillation_loss"
"""Divergence from the teachers that `distillation.coef` multiplies; 0 at tokens that no teacher scored."""
TEACHER_KL = "distillation/kl/"
"""Prefix: mean divergence from each teacher at the tokens that it scored, as in `distillation/kl/big`: the one that
`distillation.objective` names, in nats."""
TAUGHT_SHARE = "distillation/taught_share"
"""Share of sampled tokens that a teacher scored."""
NOT_TAUGHT = "distillation/not_taught/"
"""Prefix: number of trajectories that their teacher did not score, by reason: `too_long`, `attachments`, `hint` or
`server`."""
TEACHER_WAIT = "distillation/wait_s"
"""Seconds between the end of the rollout and the last scores of the teachers."""
GRAD_NORM = "actor/grad_norm"
"""Norm of the gradient before it is clipped."""
LEARNING_RATE = "actor/lr"
"""Learning rate of the update."""
ROWS_TRAINED = "actor/rows_trained"
"""Number of trained rows."""
OPTIMIZER_STEPS = "actor/optimizer_steps"
"""Number of optimiser steps in this update."""
NONFINITE_UPDATES = "actor/nonfinite_updates"
"""Number of optimiser steps that were skipped because the gradient was infinite or NaN."""
SKIPPED_UPDATE = "actor/skipped_update"
"""1 if no row had a signal and the weights are unchanged."""
DEAD_STEPS = "actor/dead_steps"
"""Consecutive steps, up to this one, whose rollout gave no usable signal."""
LOGPROB_DIFF_MAX = "actor/rollout_train_logprob_diff_max"
"""Largest absolute difference between the log-probs of trainer and rollout."""
LOGPROB_DIFF_MEAN = "actor/rollout_train_logprob_diff_mean"
"""Mean absolute difference between the log-probs of trainer and rollout."""
MISMATCH_K1 = "actor/rollout_train_kl_k1"
"""KL divergence of the trainer from the rollout under the same weights, by the estimator `k1`."""
MISMATCH_K3 = "actor/rollout_train_kl_k3"
"""KL divergence of the trainer from the rollout under the same weights, by the estimator `k3`."""
TRUNCATED_SHARE = "actor/correction_truncated_share"
"""Share of tokens whose importance weight was truncated at `actor.correction.max_ratio`."""
MASKED_SHARE = "actor/correction_masked_share"
"""Share of tokens that `actor.correction` dropped."""
CORRECTION_WEIGHT_MEAN = "actor/correction_weight_mean"
"""Mean importance weight of trained tokens."""
CORRECTION_ESS = "actor/correction_ess"
"""Effective sample size of the importance weights of `actor.correction`, as a share of the trained tokens: 1 if all
weights are equal."""
RATIO_ESS = "actor/ratio_ess"
"""Effective sample size of the ratios of new to old probabilities, as a share of the tokens of an optimiser step; mean
over the optimiser steps."""

CRITIC_LOSS = "critic/loss"
"""Mean loss over the critic's optimiser steps."""
CRITIC_CLIP_FRACTION = "critic/clip_fraction"
"""Share of tokens whose value was clipped."""
CRITIC_GRAD_NORM = "critic/grad_norm"
"""Norm of the critic's gradient before it is clipped."""
CRITIC_LEARNING_RATE = "critic/lr"
"""Learning rate of the critic's update."""
CRITIC_OPTIMIZER_STEPS = "critic/optimizer_steps"
"""Number of the critic's optimiser steps in this update."""
CRITIC_NONFINITE_UPDATES = "critic/nonfinite_updates"
"""Number of the critic's optimiser steps that were skipped because the gradient was infinite or NaN."""
VALUE_MEAN = "critic/value_mean"
"""Mean predicted value over the trained tokens, before the update."""
RETURN_MEAN = "critic/return_mean"
"""Mean return over the trained tokens."""
EXPLAINED_VARIANCE = "critic/explained_variance"
"""1 - var(return - value) / var(return): 1 for exact predictions, 0 for a constant. Absent if all returns are equal."""

SFT_LOSS = "sft/loss"
"""Mean cross-entropy of the trained tokens of a supervised step, in nats."""
SFT_TOKENS = "sft/tokens"
"""Number of tokens that a supervised step trained."""
SFT_GRAD_NORM = "sft/grad_norm"
"""Norm of the gradient of a supervised step before it is clipped."""
SFT_LEARNING_RATE = "sft/lr"
"""Learning rate of a supervised step."""
SFT_VALIDATION_LOSS = "sft/val_loss"
"""Mean cross-entropy of the tokens of the validation examples, in nats."""

SECONDS = "timing_s/"
"""Prefix: seconds of each phase."""
STEP_SECONDS = "timing_s/step"
"""Seconds of the whole step."""
TOKENS_PER_SECOND = "perf/model_tokens_per_s"
"""Sampled tokens per second of rollout; in supervised training all tokens, trained or not, per second of update."""
TIME = "time/"
"""Prefix: shares of the time of a step, which sum to 1. The page on stored trajectories defines them."""
TIME_QUEUE = "time/queue"
"""Rollout: held back by `rollout.max_concurrent`, or queued for a server."""
TIME_PREFILL = "time/prefill"
"""Rollout: from the start of a request to its first token, if the server reports it."""
TIME_DECODE = "time/decode"
"""Rollout: the rest of the completions; whole completions if no server reports their first token."""
TIME_TOOLS = "time/tools"
"""Rollout: tools and interactions."""
TIME_REWARD = "time/reward"
"""Rollout: scoring."""
TIME_OTHER = "time/other"
"""Rollout: encoding, closing, the journal, the loops' own code, and untraced time."""
TIME_TRAINING = "time/training"
"""Advantages and update."""
TIME_WEIGHTS = "time/weights"
"""Publishing the new weights to the servers."""
TIME_VALIDATION = "time/validation"
"""Rollout of the validation rows."""
TIME_IDLE = "time/idle"
"""Rollout: trajectories that do not run while others run. Also the time of the step outside of all phases."""
SLOWEST_SECONDS = "time/slowest_s"
"""Seconds of the slowest trajectory; not a share."""
UNSTORED_FILES = "storage/failed_writes"
"""Number of trajectory files that could not be written since the start of the run."""
VALIDATION = "val/"
"""Prefix: metrics of the validation rows."""


class MetricsWriter:
    """Writer of one JSON object per step to a file, and to loggers.

    Values that are not finite become null in the file, and are not passed to loggers.
    """

    def __init__(self, path: Path, *, loggers: Sequence[BackgroundWriter[Scalars]] = ()) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._loggers = loggers

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line and flush it to the operating system."""
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

    def __exit__(self, *_: object) -> None:
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
