"""Evaluations and comparisons of runs equal counts by hand, and their intervals are tested by simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from agent_loop.errors import DataError
from agent_loop.storage import write_trajectories
from agent_loop.training.evaluation.estimates import (
    MeanEstimate,
    estimate_difference,
    estimate_share,
    estimate_welch,
    pass_at_k,
    student_quantile,
)
from agent_loop.training.evaluation.runs import (
    MetricComparison,
    RunGroup,
    TrainingRun,
    choose_metrics,
    compare_metric,
    read_groups,
    read_run,
)
from agent_loop.training.evaluation.scores import (
    Evaluation,
    RowResult,
    categories_of,
    changed_pairs,
    difference,
    pair_rows,
    score,
    score_categories,
    summarise,
)
from agent_loop.training.evaluation.summary import EvaluationSummary, evaluate_stored, read_summary
from agent_loop.trajectory import AgentLoopOutput, Failure, FailureKind, Incident, IncidentKind, Trajectory
from agent_loop.types import StopReason
from tests.helpers import user
from tests.run_folders import write_rewards, write_run


def trajectory(
    group: int, rollout: int, reward: float | None, *, branch: int | None = None, **facts: object
) -> Trajectory:
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], **facts)
    return Trajectory(output, {"raw_prompt": user(f"question {group}")}, group, rollout, reward, {}, branch)


def evaluation_of(rewards: Sequence[Sequence[float | None]]) -> Evaluation:
    return summarise(
        [trajectory(g, r, reward) for g, group in enumerate(rewards) for r, reward in enumerate(group)],
        success_threshold=1.0,
    )


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            draws = list(combinations([True] * num_correct + [False] * (num_samples - num_correct), k))
            expected = sum(map(any, draws)) / len(draws)
            assert pass_at_k(num_samples, num_correct=num_correct, k=k) == pytest.approx(expected)


def test_a_summary_counts_successes_reasons_and_incidents() -> None:
    incident = Incident(IncidentKind.TOOL_ERROR, "no such file")
    evaluation = summarise(
        [
            trajectory(0, 0, 1.0),
            trajectory(0, 1, 0.0, incidents=[incident, incident]),
            trajectory(1, 0, 0.5, stop_reason=StopReason.DEADLINE),
            trajectory(1, 1, None, stop_reason=StopReason.FAILED),
        ],
        success_threshold=1.0,
    )

    scores = evaluation.scores
    assert (scores.num_rows, scores.num_samples, scores.num_scored, scores.num_correct) == (2, 4, 3, 1)
    assert scores.mean_reward == MeanEstimate(0.5, None, None)
    assert evaluation.success_share == 0.25
    assert {k: estimate.value for k, estimate in scores.pass_at_k.items()} == {1: 0.25, 2: 0.5}
    assert evaluation.stop_reasons == {"answered": 2, "deadline": 1, "failed": 1}
    assert evaluation.incidents == {"tool_error": 2}
    rows = [(row.prompt, row.num_correct, row.mean_reward) for row in evaluation.rows]
    assert rows == [("question 0", 1, 0.5), ("question 1", 0, 0.5)]
    metrics = evaluation.metrics()
    expected = {
        "reward/success_share": 0.25,
        "reward/mean": 0.5,
        "pass@2": 0.5,
        "pass@1/half_width": scores.pass_at_k[1].half_width,
        "rollout/stop_reason/failed": 0.25,
        "rollout/incidents/tool_error": 0.5,
    }
    assert {name: metrics[f"val/{name}"] for name in expected} == expected


def test_the_branches_of_a_rollout_are_one_sample_with_the_best_reward() -> None:
    branches = [trajectory(0, 0, reward, branch=n) for n, reward in enumerate((0.0, 1.0, None))]
    evaluation = summarise([*branches, trajectory(0, 1, 0.0)], success_threshold=1.0)
    (row,) = evaluation.rows
    assert (evaluation.num_trajectories, row.num_samples, row.num_correct, row.mean_reward) == (4, 2, 1, 0.5)
    assert list(evaluation.scores.pass_at_k) == [1, 2]


# -- intervals ---------------------------------------------------------------------------------------------------------


def test_the_interval_of_single_samples_is_wilsons() -> None:
    # 8 of 10, as in Brown, Cai and DasGupta 2001 and every table of Wilson's interval
    estimate = estimate_share([1.0] * 8 + [0.0] * 2, num_draws=10)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    nothing = estimate_share([0.0] * 10, num_draws=10)
    assert (nothing.low, nothing.high) == pytest.approx((0.0, 0.2775), abs=1e-4)


@pytest.mark.parametrize("num_rows", [10, 100])
@pytest.mark.parametrize(("num_samples", "k"), [(1, 1), (8, 1), (8, 4), (8, 8)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.2, 0.2), (4.0, 4.0), (0.5, 2.0)])
def test_95_percent_of_the_intervals_of_pass_at_k_contain_the_true_value(
    num_rows: int, num_samples: int, k: int, alpha: float, beta: float
) -> None:
    """Draw the difficulties of rows from a beta distribution: spread, either 0 or 1, similar, or mostly hard."""
    # E[(1 - p)^k] of a beta distribution
    truth = 1 - math.prod((beta + i) / (alpha + beta + i) for i in range(k))
    random = np.random.default_rng([num_rows, num_samples, k])
    values = np.array([pass_at_k(num_samples, num_correct=c, k=k) for c in range(num_samples + 1)])
    num_trials, hits = 300, 0
    for _ in range(num_trials):
        shares = values[random.binomial(num_samples, random.beta(alpha, beta, num_rows))]
        estimate = estimate_share(shares.tolist(), num_draws=num_rows * num_samples / k)
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
        hits += estimate.low <= truth <= estimate.high
    # 0.95 less three standard errors of 300 trials
    assert hits / num_trials >= 0.91


@pytest.mark.parametrize("num_samples", [1, 8])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_95_percent_of_intervals_of_a_difference_hold_the_true_value(num_samples: int, loss: float) -> None:
    random = np.random.default_rng([num_samples, int(10 * loss)])
    num_trials, num_rows, hits = 300, 40, 0
    for _ in range(num_trials):
        chances = random.beta(1, 1, num_rows)
        better, worse = (random.binomial(num_samples, chances * share) for share in (1, 1 - loss))
        estimate = estimate_difference(((better - worse) / num_samples).tolist(), num_samples=num_samples)
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= 0.5 * loss <= estimate.high
    assert hits / num_trials >= 0.91


# Quantiles of 0.975 of Student's t by degrees of freedom, as tables of statistics print them.
QUANTILES = {1: 12.7062047, 2: 4.3026527, 3: 3.1824463, 5: 2.5705818, 10: 2.2281389, 120: 1.9799304}


def test_quantiles_are_those_of_the_tables() -> None:
    assert {df: student_quantile(df) for df in QUANTILES} == pytest.approx(QUANTILES, abs=1e-6)


def share_within(limit: float, *, df: float) -> float:
    """Return the probability that Student's t is within the limit, by the trapezoidal rule on its density."""
    t = np.linspace(-limit, limit, 400_001)
    constant = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    density = constant * (1 + t**2 / df) ** (-(df + 1) / 2)
    return float(np.sum(density[1:] + density[:-1])) / 2 * (t[1] - t[0])


def test_welch_equals_the_calculation_by_hand() -> None:
    # variances 1 and 20/3, squared errors 1/3 and 5/3, df = 2^2 / ((1/3)^2 / 2 + (5/3)^2 / 3) = 216 / 53
    estimate = estimate_welch([2.0, 4.0, 6.0, 8.0], others=[1.0, 2.0, 3.0])
    assert estimate.value == pytest.approx(3.0)
    assert estimate.half_width is not None
    assert share_within(estimate.half_width / math.sqrt(2), df=216 / 53) == pytest.approx(0.95, abs=1e-8)


# -- categories and pairs of rows --------------------------------------------------------------------------------------


def test_categories_are_values_of_a_column_or_of_a_nested_field() -> None:
    rows = [
        {"level": 10, "extra_info": {"kind": "sums", "tags": ["a", "é"]}},
        {"level": 9, "extra_info": {"kind": ""}, "extra_info.kind": "its own column"},
        {"extra_info": "text"},
    ]
    assert categories_of(rows, column="level") == ["10", "9", "-"]
    assert categories_of(rows, column="extra_info.kind") == ["sums", "its own column", "-"]
    assert categories_of(rows, column="extra_info.tags") == ['["a", "\\u00e9"]', "-", "-"]
    with pytest.raises(DataError, match=r"no row has a column 'levle'; did you mean 'level'"):
        categories_of([{"level": 1}], column="levle")


def test_each_category_has_separate_scores_and_numbers_are_sorted() -> None:
    evaluation = evaluation_of([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    scores = score_categories(evaluation.rows, categories=["10", "9", "10"])
    assert list(scores) == ["9", "10"]
    assert (scores["10"].num_rows, scores["10"].num_samples, scores["10"].num_correct) == (2, 4, 2)
    assert scores["9"].pass_at_k[2].value == 1.0
    assert scores["9"] == score(evaluation.rows[1:2])


def results(*rows: tuple[str, int], num_samples: int = 1) -> list[RowResult]:
    """Return results with these prompts and numbers of successes."""
    return [
        RowResult(group, prompt, prompt, num_samples, num_samples, num_correct, num_correct / num_samples)
        for group, (prompt, num_correct) in enumerate(rows)
    ]


def test_rows_are_paired_by_their_prompts_in_any_order() -> None:
    rows = results(("a", 1), ("twice", 1), ("twice", 0), ("new", 1))
    others = results(("twice", 0), ("twice", 1), ("a", 0))
    pairs = pair_rows(rows, others=others)
    assert [(row.group, other.group) for row, other in pairs] == [(0, 2), (1, 0), (2, 1)]
    found = difference(pairs)
    assert found is not None
    assert (found.num_rows, found.pass_at_1.value) == (3, pytest.approx(1 / 3))


def test_rows_that_flip_come_first_and_equal_rows_are_left_out() -> None:
    rows = results(("a", 2), ("b", 1), ("c", 4), num_samples=4)
    others = results(("a", 1), ("b", 1), ("c", 2), num_samples=4)
    assert [row.group for row, _ in changed_pairs(pair_rows(rows, others=others))] == [0, 2]


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = EvaluationSummary.of(evaluation_of([[0.0], [None]]), model="a model", settings={}, columns={})
    summary = EvaluationSummary.of(
        evaluation_of([[1.0], [0.5]]),
        model="model \ud800".encode("utf-8", "replace").decode(),
        settings={"rows": "digest"},
        columns={"level": ["easy", "hard"]},
        other=(tmp_path / "other", other),
    )
    summary.write(tmp_path / "summary.json")
    assert read_summary(tmp_path) == summary == read_summary(tmp_path / "summary.json")
    assert summary.comparison is not None
    assert summary.comparison.total.pass_at_1.value == 0.5
    levels = summary.comparison.categories["level"]
    assert {k: level.pass_at_1.value for k, level in levels.items()} == {"easy": 1.0, "hard": 0.0}
    assert levels["hard"].mean_reward is None


@pytest.mark.parametrize(
    ("content", "complaint"), [("{", "Invalid JSON"), ('{"format": 2}', "format: Input should be 1")]
)
def test_a_file_that_is_no_summary_is_refused_by_path(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "summary.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=rf"summary.json' is not the summary of an .*: .*({complaint})"):
        read_summary(tmp_path)


def test_stored_trajectories_are_evaluated_like_those_in_memory(tmp_path: Path) -> None:
    lost = Failure("ServerError: gone", "", FailureKind.SERVER)
    broken = Failure("ValueError: no", "", FailureKind.CODE)
    incident = Incident(kind=IncidentKind.UNKNOWN_TOOL, detail="", assistant_turn=1)
    trajectories = [
        trajectory(0, 0, 1.0, branch=0),
        trajectory(0, 0, 0.0, branch=1),
        trajectory(0, 1, 0.4, incidents=[incident]),
        trajectory(2, 0, None, stop_reason=StopReason.FAILED, failure=lost),
        trajectory(2, 1, None, stop_reason=StopReason.FAILED, failure=broken),
        trajectory(2, 2, 0.5),
    ]
    path = tmp_path / "trajectories.parquet"
    write_trajectories(path, trajectories, step=0, split="eval", success_threshold=0.5)
    stored = evaluate_stored([path])
    assert stored.evaluation == summarise(trajectories, success_threshold=0.5)
    prompts = [row.get("raw_prompt", [{}])[-1].get("content") for row in stored.rows]
    assert prompts == ["question 0", None, "question 2"]


# -- groups of runs ----------------------------------------------------------------------------------------------------


def group(source: str, runs: Mapping[int, Sequence[float]]) -> RunGroup:
    """Return a group with the rewards of each seed from step 1 on."""
    return RunGroup(
        source,
        tuple(
            TrainingRun(f"{source}-{seed}", seed, {"reward": dict(enumerate(rewards, start=1))})
            for seed, rewards in runs.items()
        ),
    )


def compare(*groups: RunGroup, last: int = 10) -> MetricComparison:
    return compare_metric(groups, metric="reward", num_recent=last)


THREE_SEEDS = group("a", {0: [1.0], 1: [5.0], 2: [9.0]})


def test_a_group_has_the_mean_over_its_runs_with_students_interval() -> None:
    found = compare(group("a", {0: [0.0, 1.0], 1: [0.0, 2.0], 2: [0.0, 3.0]}))
    half = QUANTILES[2] / math.sqrt(3)
    assert found.last.groups[0].value == 2.0
    assert found.last.groups[0].half_width == pytest.approx(half)
    # the means of both steps are half of the last values
    assert (found.num_recent, found.recent.groups[0].value) == (2, 1.0)
    assert found.recent.groups[0].half_width == pytest.approx(half / 2)
    assert found.last.differences == ()


def test_runs_with_the_same_seeds_are_paired_in_any_order() -> None:
    difference = compare(THREE_SEEDS, group("b", {2: [12.0], 0: [2.0], 1: [7.0]})).last.differences[0]
    # differences of the seeds: 1, 2 and 3
    assert difference.value == pytest.approx(2.0)
    assert difference.half_width == pytest.approx(QUANTILES[2] / math.sqrt(3))


@pytest.mark.parametrize("seeds", [(0, 1, 3), (0, 1)])
def test_runs_with_other_seeds_are_compared_by_welch(seeds: tuple[int, ...]) -> None:
    others = group("b", {seed: [2.0 * seed] for seed in seeds})
    difference = compare(THREE_SEEDS, others).last.differences[0]
    assert difference == estimate_welch([2.0 * seed for seed in seeds], others=[1.0, 5.0, 9.0])


def test_one_run_has_values_and_no_intervals() -> None:
    found = compare(group("a", {0: [1.0, 2.0]}), group("b", {0: [1.0, 3.0]}))
    assert found.last.groups == (MeanEstimate(2.0, None, None), MeanEstimate(3.0, None, None))
    assert found.last.differences[0] == MeanEstimate(1.0, None, None)


def test_only_steps_of_all_runs_are_compared() -> None:
    short, long = group("a", {0: [1.0, 2.0]}), group("b", {0: [1.0, 3.0, 9.0], 1: [1.0, 5.0, 9.0]})
    found = compare(short, long, last=1)
    assert [point.step for point in found.curve] == [1, 2]
    assert (found.num_steps_left_out, found.incomplete_runs) == (1, ("a-0",))
    assert found.last.groups[1].value == found.recent.groups[1].value == 4.0
    later = RunGroup("b", (TrainingRun("b-0", 0, {"reward": {5: 1.0, 6: 1.0}}),))
    with pytest.raises(DataError, match=r"'a-0': 1 to 2, 'b-0': 5 to 6"):
        compare(short, later)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two groups of runs, one of them in folders of their own, as the examples write them."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        write_rewards(Path(f"runs/a-{seed}"), seed=seed, rewards=[0.0, 1.0])
        write_rewards(Path(f"other/b-{seed}/train"), seed=seed, rewards=[0.0, 2.0])


@pytest.mark.usefixtures("runs")
def test_a_group_is_a_glob_a_folder_or_a_list() -> None:
    for source in ("runs/a-*", "runs", "runs/a-0, runs/a-1,", "runs/a-*,runs/a-0", "r*"):
        (found,) = read_groups([source])
        assert found.source == source
        assert [run.path for run in found.runs] == ["runs/a-0", "runs/a-1"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["runs/a-0,nothing"], "'nothing' does not exist; give the folder of a training run"),
        (["runs/c-*"], r"no path matches 'runs/c-\*'"),
        ([","], "the group ',' names no run"),
        (["runs/a-0/config.yaml"], "'runs/a-0/config.yaml' is a YAML file of settings"),
        (["evaluation"], "'evaluation' is the folder of an evaluation"),
        (["empty"], "'empty' is a folder of another kind; give the folder of a training run"),
        (["unfinished"], "'unfinished' has no metrics.jsonl, so no step of it ended"),
        (["runs/a-*", "./runs/a-1"], "give groups without common runs"),
    ],
)
def test_what_is_no_group_of_runs_is_refused_by_name(sources: list[str], message: str) -> None:
    for name in ("evaluation", "empty", "unfinished/checkpoints"):
        Path(name).mkdir(parents=True)
    Path("evaluation/summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_groups(sources)


@pytest.mark.usefixtures("runs")
def test_metrics_are_chosen_by_name_and_by_glob_and_are_by_default_the_scores_of_all_runs() -> None:
    path = write_rewards(Path("a"), seed=0, rewards=[None, float("nan"), float("inf"), 4.0])
    assert read_run(path).curves == {"reward/mean": {4: 4.0}}
    scores = {"val/pass@10": 1.0, "val/pass@2": 1.0, "val/pass@1/half_width": 0.1, "val/reward/mean": 1.0}
    both = {"reward/success_share": 1.0, "actor/loss": 1.0, **scores}
    write_run(Path("c"), seed=0, lines=[{**both, "reward/mean": 1.0}])
    write_run(Path("d"), seed=0, lines=[both])
    assert choose_metrics(read_groups(["c"]))[0] == "reward/mean"
    shared = choose_metrics(read_groups(["c", "d"]))
    assert shared == ["reward/success_share", "val/reward/mean", "val/pass@2", "val/pass@10"]
    chosen = choose_metrics(read_groups(["c"]), patterns=["actor/*", "val/pass@1*", "actor/loss"])
    assert chosen == ["actor/loss", "val/pass@1/half_width", "val/pass@10"]


@pytest.mark.usefixtures("runs")
def test_a_metric_that_runs_lack_is_refused_with_their_names() -> None:
    write_run(Path("c"), seed=0, lines=[{"reward/mean": 1.0, "actor/loss": 1.0}])
    write_run(Path("d"), seed=0, lines=[{"actor/loss": 1.0}])
    for sources, patterns, message in (
        (["c", "runs"], ["actor/loss"], r"'actor/loss' is in 'runs/a-0', 'runs/a-1'; .*: reward/mean"),
        (["c", "runs"], ["reward/men"], "did you mean 'reward/mean'"),
        (["c", "d"], [], r"none of the metrics .* is in all of 'c', 'd'; .* there are: actor/loss"),
    ):
        with pytest.raises(DataError, match=message):
            choose_metrics(read_groups(sources), patterns=patterns)
