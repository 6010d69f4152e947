"""Groups of runs are read from folders, and errors name what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.errors import DataError
from agent_loop.training.evaluation.runs import choose_metrics, read_groups, read_run
from tests.run_folders import write_rewards, write_run


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two groups of runs, one of them in folders of their own, as the examples write them."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        write_rewards(Path(f"runs/a-{seed}"), seed=seed, rewards=[0.0, 1.0])
        write_rewards(Path(f"other/b-{seed}/train"), seed=seed, rewards=[0.0, 2.0])
    return tmp_path


def paths(source: str) -> list[str]:
    (group,) = read_groups([source])
    assert group.source == source
    return [run.path for run in group.runs]


@pytest.mark.parametrize(
    "source", ["runs/a-*", "runs", "runs/a-0,runs/a-1", "runs/a-0, runs/a-1,", "runs/a-*,runs/a-0", "r*"]
)
def test_a_group_is_a_glob_a_folder_or_a_list(source: str) -> None:
    assert paths(source) == ["runs/a-0", "runs/a-1"]


def test_values_that_are_null_or_not_finite_are_left_out() -> None:
    path = write_rewards(Path("c"), seed=0, rewards=[None, float("nan"), float("inf"), 4.0])
    assert read_run(path).curves == {"reward/mean": {4: 4.0}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing", "'nothing' does not exist; give the folder of a training run"),
        ("runs/a-0,nothing", "'nothing' does not exist"),
        ("runs/c-*", r"no path matches 'runs/c-\*'"),
        (",", "the group ',' names no run"),
        ("runs/a-0/config.yaml", "'runs/a-0/config.yaml' is a YAML file of settings"),
        ("evaluation", "'evaluation' is the folder of an evaluation"),
        ("empty", "'empty' is a folder of another kind; give the folder of a training run"),
        ("unfinished", "'unfinished' has no metrics.jsonl, so no step of it ended"),
    ],
)
def test_what_is_no_run_is_refused_by_name(source: str, message: str) -> None:
    for name in ("evaluation", "empty", "unfinished/checkpoints"):
        Path(name).mkdir(parents=True)
    Path("evaluation/summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_groups([source])


@pytest.mark.parametrize("sources", [["runs", "runs/a-1"], ["runs", "runs"], ["runs/a-*", "./runs/a-1"]])
def test_a_run_in_two_groups_is_refused(sources: list[str]) -> None:
    with pytest.raises(DataError, match="give groups without common runs"):
        read_groups(sources)


def test_the_default_metrics_are_scores_that_all_runs_have() -> None:
    scores = {"val/pass@10": 1.0, "val/pass@2": 1.0, "val/pass@1/half_width": 0.1, "val/reward/mean": 1.0}
    both = {"reward/success_share": 1.0, "actor/loss": 1.0, **scores}
    write_run(Path("c"), seed=0, lines=[{**both, "reward/mean": 1.0}])
    write_run(Path("d"), seed=0, lines=[both])
    assert choose_metrics(read_groups(["c"]))[0] == "reward/mean"
    assert choose_metrics(read_groups(["c", "d"])) == [
        "reward/success_share",
        "val/reward/mean",
        "val/pass@2",
        "val/pass@10",
    ]


def test_metrics_are_chosen_by_name_and_by_glob() -> None:
    write_run(Path("c"), seed=0, lines=[{"val/a": 1.0, "val/b": 1.0, "x": 1.0}])
    groups = read_groups(["c"])
    assert choose_metrics(groups, patterns=["x", "val/*", "val/a"]) == ["x", "val/a", "val/b"]


def test_a_metric_that_runs_lack_is_refused_with_their_names() -> None:
    write_run(Path("c"), seed=0, lines=[{"reward/mean": 1.0, "actor/loss": 1.0}])
    groups = read_groups(["c", "runs"])
    with pytest.raises(
        DataError, match=r"'actor/loss' is in 'runs/a-0', 'runs/a-1'; .* there are: reward/mean"
    ):
        choose_metrics(groups, patterns=["actor/loss"])
    with pytest.raises(DataError, match="did you mean 'reward/mean'"):
        choose_metrics(groups, patterns=["reward/men"])
    write_run(Path("d"), seed=0, lines=[{"actor/loss": 1.0}])
    with pytest.raises(
        DataError, match=r"none of the metrics .* is in all of 'c', 'd'; .* there are: actor/loss"
    ):
        choose_metrics(read_groups(["c", "d"]))
