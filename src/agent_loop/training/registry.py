"""Advantage estimators, policy losses and row samplers by name. This module loads neither torch nor transformers."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agent_loop.errors import AlgorithmError
from agent_loop.registries import FunctionRegistry, RegisteredFunction
from agent_loop.runtime.describe import describe_error, describe_value

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

ESTIMATORS = FunctionRegistry(kind="advantage estimator", key="algorithm.adv_estimator")
POLICY_LOSSES = FunctionRegistry(kind="policy loss", key="actor.policy_loss")
SAMPLERS = FunctionRegistry(kind="sampler", key="data.sampler.name")


@dataclass(frozen=True, slots=True)
class EstimatorNeeds:
    """Inputs that an estimator needs besides the rewards of a batch."""

    groups: bool = False
    critic: bool = False
    greedy_rollouts: bool = False
    turns: bool = False
    forks: bool = False


def advantage_estimator(
    name: str,
    *,
    compares_in_group: bool = False,
    needs_critic: bool = False,
    needs_greedy_rollouts: bool = False,
    needs_turns: bool = False,
    needs_forks: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Register an advantage estimator for `algorithm.adv_estimator`.

    An estimator that is not registered is selected with `algorithm.adv_estimator=file.py:name`. The built-in estimators
    are in `agent_loop.training.advantages.estimators`.

    An estimator is a function, or a class whose instances are called:

        def estimator(rewards: Rewards, *, config: AlgorithmConfig) -> Tensor | Advantages

    B is the number of rows of the batch, R the number of response tokens of the longest row.

    - `rewards` holds the rewards of all rows, and the group and rollout of each row. A *group* is all rollouts of one
      prompt: rows with the same number in `groups_B`. A *rollout* is one run of an agent loop. It has several rows if
      the loop returned several outputs, its *branches*: rows with the same number in `rollouts_B`. A mean, a baseline
      or a standard deviation counts a rollout once, however many branches it has. `share_weights` returns the weight
      of each row for such statistics.
    - Rows that were not scored have a NaN in `outcome_B`. Leave them out of all statistics; they are not trained.
    - The result has shape [B] (one advantage per row) or [B, R] (one per token). Only values at trained tokens count:
      those where `mask_BR` is 1, in scored rows. They must be finite.
    - An `Advantages` object returns more: rows with a signal, returns for the critic, and whether to whiten.
    - All processes of a training call the estimator with the same batch. It must return the same in each of them.

    The function runs without gradients. An exception in it, a wrong shape, or a value that is not finite ends the
    training with an `AlgorithmError` that names the estimator.

    Args:
        name: Value of the setting. A name that is taken goes to the new estimator, with a warning.
        compares_in_group: The estimator compares rollouts of a group. It then needs `rollout.n` of at least 2, and
            groups whose rewards are all equal are dropped (`algorithm.drop_zero_variance_groups`).
        needs_critic: Train a critic. The estimator gets `values_BR`, the values predicted before each token, and
            returns `Advantages` with `returns_BR`.
        needs_greedy_rollouts: Run one greedy rollout per prompt. The estimator gets `baselines_B`, the reward of the
            greedy rollout of each row's prompt, NaN if it has none.
        needs_turns: The estimator gets `turns`, the turns of each row with their rewards and states (`Turns`).
        needs_forks: Continue trajectories anew from their middle, as `algorithm.fork` says. The continuations are rows
            of the batch, branches of the rollouts that they fork. `turns.forked_B` says from which turn on.
    """

    def decorate(function: FunctionT) -> FunctionT:
        needs = EstimatorNeeds(
            groups=compares_in_group,
            critic=needs_critic,
            greedy_rollouts=needs_greedy_rollouts,
            turns=needs_turns,
            forks=needs_forks,
        )
        ESTIMATORS.add(name, function, options=needs)
        return function

    return decorate


def policy_loss(name: str) -> Callable[[FunctionT], FunctionT]:
    """Register a policy loss for `actor.policy_loss`.

    A loss that is not registered is selected with `actor.policy_loss=file.py:name`. The built-in losses are in
    `agent_loop.training.losses.policy`.

    A loss is a function, or a class whose instances are called:

        def loss(
            logprobs_BT: Tensor,
            *,
            old_logprobs_BT: Tensor,
            advantages_BT: Tensor,
            mask_BT: Tensor,
            config: ActorConfig,
        ) -> Tensor | TokenLoss

    It is called once per micro-batch, with B rows and T response tokens. A row is never split over micro-batches.

    - `logprobs_BT` are the log-probs under the policy that is trained, with a gradient. `old_logprobs_BT` are those
      under the policy that sampled.
    - `mask_BT` is 1 at trained tokens. The other tokens may hold any value; they get no gradient.
    - Compute ratios with `masked_difference`, which bounds log-ratios and handles tokens that a policy cannot sample.
    - The result is the loss of each token, [B, T], finite at trained tokens. The actor multiplies it by the weights of
      `actor.correction` and aggregates it with `actor.loss_agg_mode`. The gradient depends neither on the division of a
      rollout into branches nor on the micro-batches. KL and entropy terms are added after that.
    - A `TokenLoss` object also returns metrics, [B, T] each. They are aggregated in the same way and logged as
      `actor/NAME`.

    An exception in the loss, a wrong shape, or a value that is not finite ends the training with an `AlgorithmError`
    that names the loss.

    Args:
        name: Value of the setting. A name that is taken goes to the new loss, with a warning.
    """

    def decorate(function: FunctionT) -> FunctionT:
        POLICY_LOSSES.add(name, function)
        return function

    return decorate


def row_sampler(name: str) -> Callable[[FunctionT], FunctionT]:
    """Register a sampler of rows for `data.sampler.name`.

    A sampler that is not registered is selected with `data.sampler.name=file.py:name`. The built-in samplers are in
    `agent_loop.training.samplers`.

    A sampler is a function, or a class whose instances are called:

        def sampler(step: int, *, count: int, context: SamplerContext) -> Sequence[int]

    - The result is at least `count` indices of rows, the most wanted first, or all rows if there are fewer. The first
      rows that are not skipped (`data.sampler.skip_solved`, `skip_failed`) are the batch; the next replace groups
      without variance (`algorithm.max_refills`).
    - `context` has the rows, the settings `data`, and the history: the results of all steps up to `step - 1`, in
      asynchronous training up to `step - 1 - trainer.max_staleness`.
    - Equal arguments must give equal results, so that a run that was killed resumes with the same rows. Derive random
      numbers from `context.config.seed` and `step`.
    - An object may also have `observe(step, results)`, which is called with the results of each step in order before a
      selection that may depend on them, and `state_dict()` and `load_state_dict(state)`, which checkpoints call. A
      state consists of JSON values, arrays of numbers and bytes.

    An exception in it or a wrong result ends the training with an `AlgorithmError` that names the sampler.

    Args:
        name: Value of the setting. A name that is taken goes to the new sampler, with a warning.
    """

    def decorate(function: FunctionT) -> FunctionT:
        SAMPLERS.add(name, function)
        return function

    return decorate


def check_shape(value: Any, shapes: Sequence[list[int]], *, what: str, where: str) -> None:
    """Raise an error unless a value that a function returned is a tensor of one of these shapes."""
    from torch import Tensor  # late: settings name estimators and losses where torch is not loaded

    expected = f"return a tensor of shape {' or '.join(map(str, shapes))}"
    if not isinstance(value, Tensor):
        raise AlgorithmError(f"{where} {describe_value(value)} as {what}; {expected}")
    if list(value.shape) not in shapes:
        raise AlgorithmError(f"{where} {what} of shape {list(value.shape)}; {expected}")


def call(registered: RegisteredFunction, *args: Any, key: str, **kwargs: Any) -> Any:
    """Call a registered function. Raises an AlgorithmError if the function raises."""
    try:
        return registered.function(*args, **kwargs)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise AlgorithmError(
            f"{key}={registered.name} raised {describe_error(error)} ({frame.filename}, line {frame.lineno}); fix it"
        ) from error
