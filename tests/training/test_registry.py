"""Estimators, losses and samplers of users, and the selection of rows by samplers, filters and replay."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_loop.config import ActorConfig, AlgorithmConfig, Config, DataConfig, SamplerConfig
from agent_loop.errors import AlgorithmError, ConfigError, DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.rollout.rows import RowSampler
from agent_loop.training import Advantages, Rewards, TokenLoss, advantage_estimator, policy_loss
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.advantages.estimate import estimate_advantages, estimator_needs, load_estimator
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.registry import ESTIMATORS, POLICY_LOSSES, SAMPLERS, row_sampler
from agent_loop.training.row_selection import RowSelector, Selection
from agent_loop.training.samplers import (
    RowHistory,
    RowResult,
    SamplerContext,
    curriculum,
    curriculum_weights,
    load_sampler,
    row_results,
    uniform,
)
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.harness import examples
from tests.training.fakes import FakeRollouts, sampled_batch, tiny_policy


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return sampled_batch(num_groups=2, n=3)


@pytest.fixture(autouse=True)
def registrations_of_this_test() -> Iterator[None]:
    stores: list[dict[Any, Any]] = [
        store
        for registry in (ESTIMATORS, POLICY_LOSSES)
        for store in (registry._functions, registry._options)  # pyright: ignore[reportPrivateUsage]
    ]
    before = [dict(store) for store in stores]
    yield
    for store, entries in zip(stores, before, strict=True):
        store.clear()
        store.update(entries)


def estimate(batch: RolloutBatch, name: str, **inputs: Tensor) -> Tensor:
    config = AlgorithmConfig(adv_estimator=name)
    rewards = collect_rewards(batch, config=config, response_length=9)
    return estimate_advantages(rewards, estimator=load_estimator(config), **inputs).advantages_BR


def update(batch: RolloutBatch, name: str) -> dict[str, float]:
    actor = Actor(tiny_policy(), config=ActorConfig(lr=1e-3, policy_loss=name))
    return actor.update(batch, advantages_BR=torch.linspace(-1, 1, len(batch))[:, None])


def test_an_estimator_and_the_same_function_in_a_file_agree(batch: RolloutBatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agent_loop import advantage_estimator\n"
        "@advantage_estimator('centred_by_batch')\n"
        "def centred(rewards, *, config):\n"
        "    return rewards.per_row() - rewards.per_row().mean()\n"
    )
    from_file = estimate(batch, f"{file}:centred")
    assert torch.equal(estimate(batch, "centred_by_batch"), from_file)
    assert from_file.shape == batch["responses"].shape
    assert from_file[:, 0] == pytest.approx((batch["reward"] - batch["reward"].mean()).float())


def test_a_class_is_constructed_and_gets_the_inputs_that_its_decorator_declares(batch: RolloutBatch) -> None:
    @advantage_estimator(
        "with_everything", compares_in_group=True, needs_critic=True, needs_greedy_rollouts=True
    )
    class Everything:  # pyright: ignore[reportUnusedClass]
        def __init__(self) -> None:
            self.factor = 2.0

        def __call__(
            self, rewards: Rewards, *, config: AlgorithmConfig, values_BR: Tensor, baselines_B: Tensor
        ) -> Advantages:
            return Advantages(self.factor * rewards.per_row() - baselines_B, returns_BR=values_BR + 1)

    needs = estimator_needs("with_everything")
    assert (needs.groups, needs.critic, needs.greedy_rollouts) == (True, True, True)
    zeros_BR, baselines_B = torch.zeros(batch["responses"].shape), torch.ones(len(batch))
    found = estimate(batch, "with_everything", values_BR=zeros_BR, baselines_B=baselines_B)
    assert found[:, 0] == pytest.approx(2 * batch["reward"] - 1)


def raises(*args: Any, **_: Any) -> Tensor:
    raise ValueError("no rewards today")


def returning(value: Any) -> Any:
    return lambda rewards, *, config: value


@pytest.mark.parametrize(
    ("estimator", "complaint"),
    [
        (returning(None), " returned None as advantages; return a tensor of shape"),
        (returning(torch.zeros(2)), r" returned advantages of shape \[2\]; return a .* \[6\] or \[6, "),
        (returning(torch.full((6,), torch.nan)), " returned nan as the advantage of row 0, token 0"),
        (returning(torch.full((6,), torch.inf)), " returned inf as the advantage"),
        (returning(Advantages(torch.zeros(6), has_signal_B=torch.ones(2))), r" returned has_signal_B of .*2"),
        (raises, r" raised ValueError: no rewards today \(.*test_registry\.py, line"),
    ],
)
def test_a_bad_estimate_is_a_named_error(batch: RolloutBatch, estimator: Any, complaint: str) -> None:
    advantage_estimator("mine")(estimator)
    with pytest.raises(AlgorithmError, match=rf"algorithm\.adv_estimator=mine{complaint}"):
        estimate(batch, "mine")


def start(**sections: dict[str, Any]) -> None:
    config = Config.model_validate(sections)
    PPOTrainer(config, manager=FakeRollouts()).fit().send(None)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def f(rewards): ...", r"has the signature f\(rewards\).*define it as f\(rewards, \*, config\)"),
        ("def f(rewards, *, config, more): ...", "missing a required argument: 'more'"),
        ("f = 3", "an object of type int; name a function"),
        ("g = 3", "has no 'f'"),
        ("class f:\n    def __init__(self): 1 / 0", "constructing f raised ZeroDivisionError"),
    ],
)
def test_an_estimator_that_cannot_be_called_is_refused(tmp_path: Path, source: str, complaint: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"(?s)algorithm\.adv_estimator.*{complaint}"):
        start(algorithm={"adv_estimator": f"{file}:f"})


@pytest.mark.parametrize(
    ("section", "key", "complaint"),
    [
        ("algorithm", "adv_estimator", "unknown advantage estimator; did you mean 'gae'"),
        ("actor", "policy_loss", "unknown policy loss; there are: .*gspo.*ppo"),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_that_exist(section: str, key: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is 'gea': {complaint}"):
        start(**{section: {key: "gea"}})


LOSSES = """
from agent_loop.training import TokenLoss, masked_difference, policy_loss

@policy_loss("reinforce")
def reinforce(logprobs_BT, *, old_logprobs_BT, advantages_BT, mask_BT, config):
    ratio_BT = masked_difference(logprobs_BT, old_logprobs_BT, mask_BT=mask_BT).exp()
    return TokenLoss(-ratio_BT * advantages_BT, {"ratio": ratio_BT})
"""


def test_a_loss_from_a_file_trains_and_logs_its_metrics(batch: RolloutBatch, tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text(LOSSES)
    metrics = update(batch, f"{file}:reinforce")
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/loss"] == pytest.approx(update(batch, "ppo")["actor/loss"], abs=1e-5)
    assert update(batch, "reinforce") == metrics


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (lambda x_BT, **_: x_BT.mean(), r"returned a loss of shape \[\]; return a tensor of shape"),
        (lambda x_BT, **_: 0.0, "returned 0.0 .* as a loss"),
        (lambda x_BT, **_: x_BT * torch.nan, "returned a loss that is not finite at"),
        (lambda x_BT, **_: torch.zeros_like(x_BT), "returned a loss without a gradient"),
        (lambda x_BT, **_: TokenLoss(x_BT, {"loss": x_BT}), "returned the metric 'loss', which the actor"),
        (lambda x_BT, **_: x_BT[7, 7, 7], "raised IndexError"),
    ],
)
def test_a_bad_result_of_a_loss_is_a_named_error(batch: RolloutBatch, loss: Any, complaint: str) -> None:
    policy_loss("mine")(loss)
    with pytest.raises(AlgorithmError, match=rf"actor\.policy_loss=mine {complaint}"):
        update(batch, "mine")


# -- selection of rows -------------------------------------------------------------------------------------------------

NUM_SCORED = 8


def result(row: int, num_successes: int, *, mean_reward: float | None = None) -> RowResult:
    share = num_successes / NUM_SCORED
    return RowResult(row, NUM_SCORED, num_successes, share if mean_reward is None else mean_reward)


@pytest.fixture
def register() -> Iterator[Any]:
    """Return a decorator that registers a sampler as `mine` until the end of the test."""
    yield row_sampler("mine")
    del SAMPLERS._functions["mine"]  # pyright: ignore[reportPrivateUsage]


def context_of(num_rows: int, results: Sequence[RowResult] = ()) -> SamplerContext:
    history = RowHistory(num_rows, config=SamplerConfig(floor=0.1))
    history.observe(1, results)
    config = DataConfig(sampler=SamplerConfig(floor=0.1), seed=3)
    return SamplerContext([{"n": n} for n in range(num_rows)], history, 2, config)


def test_uniform_selects_the_rows_of_the_epochs_and_then_the_others() -> None:
    context = context_of(10)
    order = RowSampler(range(10), batch_size=2, seed=3)
    for step in range(1, 12):
        assert uniform(step, count=2, context=context) == order.batch(step)
        whole = uniform(step, count=10, context=context)
        assert whole == [*order.batch(step), *order.others(step, skip=0, count=8)]
        assert sorted(whole) == list(range(10))


def test_curriculum_draws_rows_in_proportion_to_their_weights() -> None:
    successes = {0: 0, 1: 1, 2: 4, 3: 7, 4: 8}
    context = context_of(6, [result(row, n) for row, n in successes.items()])
    weights_N = curriculum_weights(context.history, floor=0.1)
    num_draws = 10_000
    counts = Counter(curriculum(step, count=1, context=context)[0] for step in range(num_draws))
    shares = [n / NUM_SCORED for n in successes.values()]
    assert weights_N == pytest.approx([0.1 + 0.9 * 4 * p * (1 - p) for p in shares] + [1.0])
    expected_N = num_draws * weights_N / weights_N.sum()
    chi_square = sum((counts[row] - expected) ** 2 / expected for row, expected in enumerate(expected_N))
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand draws of a seed


def test_curriculum_draws_each_row_once_and_depends_on_the_step_and_the_seed_alone() -> None:
    context = context_of(50, [result(row, row % 9) for row in range(30)])
    orders = [curriculum(step, count=50, context=context) for step in (1, 1, 2)]
    assert sorted(orders[0]) == list(range(50))
    assert orders[0] == orders[1] != orders[2]
    assert curriculum(1, count=7, context=context) == orders[0][:7]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0.5, 1.0], "return indices"),
        ([0], "returned 1 indices, where count is 2"),
        ([0, 9], "indices from 0 to 3"),
        ([-1, 0], "indices from 0 to 3"),
        (None, "return indices"),
    ],
)
def test_a_wrong_result_of_a_sampler_ends_the_training_with_its_name(
    returned: Any, message: str, register: Any
) -> None:
    register(lambda step, *, count, context: returned)
    with pytest.raises(AlgorithmError, match=f"data.sampler.name=mine.*{message}"):
        load_sampler("mine").order(1, count=2, context=context_of(4))


def test_a_sampler_of_a_user_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "samplers.py"
    file.write_text("def last(step, *, count, context):\n    return range(len(context.rows))[::-1]\n")
    assert load_sampler(f"{file}:last").order(1, count=2, context=context_of(4)) == [3, 2]


def test_the_estimate_is_a_moving_average_of_successes_or_of_rewards() -> None:
    by_success = RowHistory(2, config=SamplerConfig(smoothing=0.25))
    by_reward = RowHistory(2, config=SamplerConfig(smoothing=0.25, success="reward"))
    for history in (by_success, by_reward):
        history.observe(1, [result(0, 8, mean_reward=0.5)])
        history.observe(2, [result(0, 0, mean_reward=7.0)])
    assert by_success.success_N[0] == 0.75
    assert by_reward.success_N[0] == 0.5 + 0.25 * 0.5
    assert np.isnan(by_success.success_N[1])
    assert by_success.num_results_N.tolist() == [2, 0]
    assert by_success.last_step_N.tolist() == [2, 0]


def test_a_row_is_skipped_after_a_streak_and_comes_back_when_its_time_is_over() -> None:
    history = RowHistory(3, config=SamplerConfig(skip_solved=2, skip_failed=3, skip_for=4))
    for step in (1, 2, 3):
        history.observe(step, [result(0, 8), result(1, 0), result(2, 8 if step % 2 else 4)])

    def skipped(step: int) -> dict[str, list[int]]:
        return {name: np.flatnonzero(is_N).tolist() for name, is_N in history.skipped_by(step).items()}

    assert skipped(4) == skipped(7) == {"skip_solved": [0], "skip_failed": [1]}
    assert skipped(8) == {"skip_solved": [], "skip_failed": []}
    history.observe(8, [result(1, 0)])
    assert skipped(9) == {"skip_solved": [], "skip_failed": [1]}


def test_results_count_scored_rollouts_once_however_many_branches_they_have() -> None:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1])
    trajectories = [
        Trajectory(output, {}, group, rollout, reward, {}, branch)
        for group, rollout, reward, branch in (
            (0, 0, 1.0, 0),
            (0, 0, 0.0, 1),
            (0, 1, 0.0, None),
            (0, 2, None, None),
            (1, 0, None, None),
            (2, 0, 2.0, None),
        )
    ]
    results = row_results(trajectories, rows=[7, 8, 9], success_threshold=1.0)
    assert results == [RowResult(7, 2, 1, 0.25), RowResult(9, 1, 1, 2.0)]


NUM_ROWS, NUM_STEPS, NUM_GROUPS = 12, 14, 4


def selector_of(
    *, max_staleness: int = 0, max_refills: int = 0, num_rows: int = NUM_ROWS, **sampler: Any
) -> RowSelector:
    config = Config.model_validate(
        {
            "data": {"train_batch_size": NUM_GROUPS, "seed": 5, "sampler": sampler},
            "algorithm": {"max_refills": max_refills},
            "trainer": {"mode": "async" if max_staleness else "sync", "max_staleness": max_staleness},
        }
    )
    rows = [{"raw_prompt": [{"role": "user", "content": str(n)}]} for n in range(num_rows)]
    return RowSelector(rows, config)


def result_of(step: int, row: int) -> RowResult:
    """Return a result that depends on the step and the row alone: the first rows fail, the last rows are solved."""
    drawn = random.Random(1000 * step + row).randint(0, 8)
    return result(row, 0 if row < 3 else 8 if row > 8 else drawn)


def group_of(step: int, group: int, *, version: int) -> list[Trajectory]:
    logprobs = np.array([-0.1, -0.2, -1 / 3], np.float32)
    trajectories: list[Trajectory] = []
    for rollout in range(2):
        sampled = Segment(as_token_ids([step, group, rollout]), Origin.MODEL, logprobs, version)
        segments = [Segment(as_token_ids([1, 2]), Origin.PROMPT), sampled]
        output = AgentLoopOutput(segments=segments, extra_fields={"note": f"{step}/{group}"})
        trajectories.append(
            Trajectory(output, {"raw_prompt": []}, group, rollout, float(rollout), {"part": 1.5})
        )
    return trajectories


class Run:
    """Run of a selector: the rollouts of `max_staleness` steps are selected ahead, as in a training."""

    def __init__(self, *, max_staleness: int, **sampler: Any) -> None:
        self._options = {"max_staleness": max_staleness, "max_refills": 1, **sampler}
        self._max_staleness = max_staleness
        self.selections: dict[int, Selection] = {}
        self.replayed: dict[int, list[Any]] = {}

    def go(self, *, first_step: int, until: int, checkpoint: Path | None, saves: Mapping[int, Path]) -> None:
        selector = selector_of(**self._options)
        if checkpoint is not None:
            assert selector.load(checkpoint, has_same_rows=True) is None
        for step in range(first_step, until + 1):
            for ahead in range(step, min(step + self._max_staleness, NUM_STEPS) + 1):
                selected = selector.select(ahead)
                assert self.selections.setdefault(ahead, selected) == selected
            selection = selector.select(step)
            forms = [
                (t.group, t.output.response_ids.tolist(), str(t.output.response_logprobs))
                for t in selector.replayed(selection, first_group=100)
            ]
            assert self.replayed.setdefault(step, forms) == forms
            rows = [*selection.rows, *selection.spare[:1]]
            version = max(0, step - 1 - self._max_staleness)
            informative = [
                t for group in range(len(selection.rows)) for t in group_of(step, group, version=version)
            ]
            results = [result_of(step, row) for row in rows]
            selector.observe(step, results, informative=informative, rows=rows)
            if step in saves:
                selector.save(saves[step])


SAMPLERS_TO_TEST: Sequence[dict[str, Any]] = (
    {"name": "uniform"},
    {"name": "curriculum", "floor": 0.05},
    {"name": "curriculum", "skip_solved": 1, "skip_failed": 2, "skip_for": 3},
    {"name": "uniform", "replay_share": 0.5, "replay_max_age": 6},
    {"name": "curriculum", "skip_failed": 2, "replay_share": 0.25, "replay_max_age": 5},
)


@pytest.mark.parametrize("sampler", SAMPLERS_TO_TEST)
@pytest.mark.parametrize("max_staleness", [0, 2])
@examples(8)
@given(stops=st.lists(st.integers(1, NUM_STEPS), max_size=4), save_every=st.integers(1, 4))
def test_a_run_that_is_killed_anywhere_selects_the_rows_of_a_run_that_is_not(
    tmp_path_factory: pytest.TempPathFactory,
    sampler: dict[str, Any],
    max_staleness: int,
    stops: list[int],
    save_every: int,
) -> None:
    whole, killed = (Run(max_staleness=max_staleness, **sampler) for _ in range(2))
    whole.go(first_step=1, until=NUM_STEPS, checkpoint=None, saves={})
    last: tuple[int, Path | None] = (0, None)
    for stop in [*stops, NUM_STEPS]:
        saved, checkpoint = last
        steps = [step for step in range(saved + 1, stop + 1) if step % save_every == 0]
        folders = {step: tmp_path_factory.mktemp("checkpoint") for step in steps}
        killed.go(first_step=saved + 1, until=stop, checkpoint=checkpoint, saves=folders)
        if steps:
            last = (steps[-1], folders[steps[-1]])
    assert killed.selections == whole.selections
    assert killed.replayed == whole.replayed
    assert sorted(whole.selections) == list(range(1, NUM_STEPS + 1))


def test_rows_that_were_solved_or_failed_are_replaced_by_others() -> None:
    selector = selector_of(skip_solved=1, skip_failed=1)
    selector.observe(1, [RowResult(row, 8, 8 if row % 2 else 0, 0.5) for row in range(7)])
    for step in range(2, 20):
        selection = selector.select(step)
        assert len(selection.rows) == NUM_GROUPS
        assert set(selection.rows) <= set(range(7, NUM_ROWS))
        assert selection.note is None
        assert selection.metrics[names.ROWS_SKIPPED_SHARE] == 7 / NUM_ROWS
        assert selection.metrics[names.ROWS_SEEN] == 7


def test_filters_that_leave_too_few_rows_are_lifted_and_named() -> None:
    selector = selector_of(skip_solved=1, max_refills=2)
    selector.observe(1, [result(row, 8) for row in range(NUM_ROWS - 1)])
    selection = selector.select(2)
    assert len(set(selection.rows)) == NUM_GROUPS
    assert selection.rows[0] == NUM_ROWS - 1
    assert selection.spare == []
    assert selection.note is not None
    assert "data.sampler.skip_solved skip" in selection.note
    assert "all but 1" in selection.note
    assert selection.metrics[names.ROWS_SUCCESS] == 1.0


def test_no_replayed_token_is_older_than_the_bound_and_no_group_is_replayed_twice() -> None:
    max_age = 3
    selector = selector_of(replay_share=0.5, replay_max_age=max_age)
    rng, seen = random.Random(0), set[str]()
    num_replayed = 0
    for step in range(1, 60):
        selection = selector.select(step)
        replayed = selector.replayed(selection, first_group=len(selection.rows))
        assert len(selection.rows) + len(selection.replayed) == NUM_GROUPS
        assert {t.group for t in replayed} == set(range(len(selection.rows), NUM_GROUPS))
        for each in replayed:
            [version] = {s.weight_version for s in each.output.segments if s.weight_version is not None}
            assert step - 1 - version <= max_age
            assert each.rollout or each.output.extra_fields["note"] not in seen
            seen.add(each.output.extra_fields["note"])
        num_replayed += len(selection.replayed)
        informative = [
            t
            for group in range(len(selection.rows))
            if rng.random() < 0.5
            for t in group_of(step, group, version=max(0, step - 1 - rng.randint(0, 4)))
        ]
        selector.observe(step, [], informative=informative, rows=selection.rows)
    assert num_replayed > 40


def test_a_users_sampler_is_kept_in_checkpoints(tmp_path: Path, register: Any) -> None:
    class Rotating:
        first = 0

        def __call__(self, step: int, *, count: int, context: Any) -> list[int]:
            return [(self.first + n) % len(context.rows) for n in range(count)]

        def observe(self, step: int, results: Sequence[RowResult]) -> None:
            self.first += len(results)

        def state_dict(self) -> dict[str, int]:
            return {"first": self.first}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.first = state["first"]

    register(Rotating)
    selector, resumed = selector_of(name="mine"), selector_of(name="mine")
    for step in (1, 2):
        selector.observe(step, [result_of(step, row) for row in selector.select(step).rows])
    selector.save(tmp_path)
    assert resumed.load(tmp_path, has_same_rows=True) is None
    assert selector.select(3) == resumed.select(3)
    assert resumed.select(3).rows == [8, 9, 10, 11]


def test_a_resume_with_other_rows_or_without_a_state_starts_without_results(tmp_path: Path) -> None:
    selector = selector_of(name="curriculum")
    selector.observe(1, [result_of(1, row) for row in range(NUM_ROWS)])
    selector.select(2)
    (tmp_path / "saved").mkdir()
    selector.save(tmp_path / "saved")
    other = selector_of(name="curriculum", num_rows=NUM_ROWS + 1)
    note = "data.sampler starts without results: "
    assert other.load(tmp_path / "saved", has_same_rows=False) == f"{note}the rows have changed"
    assert not other.history.num_results_N.any()
    assert selector.load(tmp_path, has_same_rows=True) == f"{note}the checkpoint holds none"
    assert selector_of().load(tmp_path, has_same_rows=True) is None


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(DataError, match=r"the data set has 3 rows, fewer than data\.train_batch_size=4"):
        selector_of(num_rows=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trainer": {"mode": "async", "max_staleness": 2}}, "replay_max_age is 4, .*give at least 5"),
        ({"algorithm": {"adv_estimator": "remax"}}, r"adv_estimator=remax needs greedy rollouts"),
    ],
)
def test_replay_is_refused_where_no_group_could_be_replayed(values: dict[str, Any], message: str) -> None:
    config = Config.model_validate({"data": {"sampler": {"replay_share": 0.5}}, **values})
    with pytest.raises(ConfigError, match=message):
        RowSelector([{"n": n} for n in range(2000)], config)
