"""Data of the pages of several runs and of evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agent_loop.cli.view import _are_several
from agent_loop.files.file_kinds import find_runs
from agent_loop.storage.metrics_file import read_metrics
from agent_loop.training.evaluation.runs import RunGroup, compare_metric, read_run
from agent_loop.training.evaluation.summary import read_summary
from agent_loop.viewer.app import create_collection_app
from agent_loop.viewer.collection import RunCollection, changed_settings, differing_settings, seed_groups
from agent_loop.viewer.evaluations import Evaluations
from agent_loop.viewer.run_record import RunRecord
from tests.viewer.synthetic import NUM_ROWS, RATES, prompt_of, write_collection, write_training


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def client(root: Path) -> TestClient:
    app = create_collection_app(RunCollection([root]), hosts=None)
    return TestClient(app, raise_server_exceptions=False)


def get(client: TestClient, path: str, **parameters: Any) -> Any:
    reply = client.get(f"/api/{path}", params=parameters)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_runs_and_evaluations_are_found_below_folders_and_inside_runs(root: Path, tmp_path: Path) -> None:
    names = {path.relative_to(root).as_posix() for path in find_runs([root])}
    assert names == {"low-0", "low-1", "high-0", "high-1", "evals/base", "evals/trained"}
    assert find_runs([root / "low-0", root]) == find_runs([root / "low-0", root, root / "low-0"])
    run = write_training(tmp_path / "run", rate=RATES["low"], seed=0)
    (run / "evals" / "last").mkdir(parents=True)
    (run / "evals" / "last" / "summary.json").touch()
    (run / "checkpoints" / "step-1" / "summary.json").mkdir(parents=True)
    assert find_runs([run]) == [run, run / "evals" / "last"]


def test_curves_are_those_of_the_compare_command(client: TestClient, root: Path) -> None:
    curves = get(client, "curves", name="reward/mean")["reward/mean"]
    group = RunGroup("low", (read_run(root / "low-0"), read_run(root / "low-1")))
    expected = compare_metric([group], metric="reward/mean", num_recent=10)
    found = next(band for band in curves["groups"].values() if band["mean"][-1] < 0.5)
    assert found["mean"] == [point.groups[0].value for point in expected.curve]
    assert found["low"] == [point.groups[0].low for point in expected.curve]
    assert (found["min"][-1], found["max"][-1]) == (pytest.approx(0.4), pytest.approx(0.45))
    assert curves["runs"]["low-1"][0] == [1, 2, 3, 4, 5, 6]


def test_runs_that_differ_in_seed_and_folder_alone_are_one_group() -> None:
    runs = {
        "a": {"trainer.seed": 0, "trainer.run_dir": "runs/a", "rollout.trace": "runs/a/t.jsonl", "lr": 1},
        "b": {"trainer.seed": 1, "trainer.run_dir": "runs/b", "rollout.trace": "runs/b/t.jsonl", "lr": 1},
        "c": {"trainer.seed": 1, "trainer.run_dir": "runs/c", "rollout.trace": "runs/c/t.jsonl", "lr": 2},
        "d": {},
    }
    assert seed_groups(runs) == [["a", "b"], ["c"], ["d"]]
    differing = differing_settings(runs)
    assert differing == {
        "lr": {"a": "1", "b": "1", "c": "2"},
        "trainer.seed": {"a": "0", "b": "1", "c": "1"},
    }
    assert changed_settings(differing) == {"c": {"lr": "2"}}


def test_curves_grow_with_the_file_and_restart_with_a_new_one(tmp_path: Path) -> None:
    file, record = tmp_path / "metrics.jsonl", RunRecord(tmp_path)
    assert record.curves() == {}
    file.write_text('{"step": 1, "a": 1.0, "b": null}\n', encoding="utf-8")
    assert record.curves() == {"a": {1: 1.0}}
    with file.open("a", encoding="utf-8") as appended:
        appended.write('{"step": 2, "a": 3.0, "b": 1.0}\n')
    assert record.curves() == {"a": {1: 1.0, 2: 3.0}, "b": {2: 1.0}}
    replaced = tmp_path / "new"
    replaced.write_text('{"step": 5, "c": 1.0}\n', encoding="utf-8")
    replaced.replace(file)
    assert record.curves() == {"c": {5: 1.0}}


def test_a_prompt_is_found_in_every_run(client: TestClient) -> None:
    for run in ("low-0", "high-1", "evals~base"):
        assert get(client, "prompt-index", run=run) == NUM_ROWS
    listed = get(client, "prompts", text="PART 1?")
    [prompt] = listed["prompts"]
    assert prompt["prompt"] == prompt_of(1)
    assert prompt["runs"] == {"low-0": 32, "high-1": 32, "evals~base": 2}
    found = get(client, "prompt", digest=prompt["digest"])["runs"]
    assert {sample["step"] for sample in found["low-0"]} == {1, 2, 3, 4, 5, 6}
    assert {sample["split"] for sample in found["evals~base"]} == {"eval"}


def test_scores_are_those_of_the_summary_and_of_the_stored_trajectories(
    client: TestClient, root: Path, tmp_path: Path
) -> None:
    summary = read_summary(root / "evals" / "base")
    found = get(client, "evaluation", key="evals~base|all")
    for k, estimate in summary.evaluation.scores.pass_at_k.items():
        assert found["scores"]["pass_at_k"][str(k)] == [estimate.value, estimate.low, estimate.high]
    assert list(found["categories"]["level"]) == ["easy", "hard"]
    assert found["columns"] == ["extra_info.id", "level"]
    file = tmp_path / "trajectories.parquet"
    file.write_bytes((root / "evals" / "base" / "trajectories.parquet").read_bytes())
    again = Evaluations(lambda: {"": tmp_path}).evaluation("|all", by="level")
    assert again["scores"] == found["scores"]
    assert again["categories"] == found["categories"]
    assert again["rows"] == found["rows"]


def test_a_validation_is_compared_with_an_evaluation_row_by_row(client: TestClient) -> None:
    found = get(client, "comparison", key="evals~trained|all", other="low-0|val-3", by="level")
    assert found["num_rows"] == NUM_ROWS
    assert (found["num_pass"], found["num_fail"]) == (5, 1)
    assert [one["row"]["group"] for one in found["changed"] if one["flip"] == "fail"] == [3]
    assert list(found["categories"]["level"]) == ["easy", "hard"]
    samples = get(client, "samples", key="evals~trained|all", group=3)
    assert [(one["rollout"], one["reward"]) for one in samples] == [(0, 0.0), (1, 0.0)]


def test_each_run_has_its_own_pages(client: TestClient) -> None:
    assert 'data-home="runs"' in client.get("/").text
    assert 'data-up="../../"' in client.get("/run/low-0").text
    assert 'data-home="evaluations"' in client.get("/run/evals~base/").text
    assert client.get("/run/low-0/static/main.js").status_code == 200
    assert client.get("/run/low-0/api/config").json()["trainer"]["seed"] == 0
    assert [one["step"] for one in client.get("/run/low-0/api/evaluations").json()] == [3, 6]
    assert client.get("/run/none/api/state").status_code == 404


def test_a_folder_with_one_run_shows_this_run_until_there_are_more(tmp_path: Path) -> None:
    write_training(tmp_path / "a b", rate=RATES["low"], seed=0)
    client = TestClient(create_collection_app(RunCollection([tmp_path]), hosts=None))
    first = client.get("/")
    assert first.url.path == "/run/a b/"
    assert first.status_code == 200
    write_training(tmp_path / "c", rate=RATES["low"], seed=1)
    assert client.get("/").url.path == "/"
    assert _are_several([tmp_path])
    assert not _are_several([tmp_path / "c"])


def test_the_metrics_of_verls_file_logger_have_the_names_of_this_package(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "data": {"critic/score/mean": 0.25, "actor/grad_norm": 2.0}},
        {"step": 2, "data": {"critic/score/mean": 0.5, "val-core/openai/gsm8k/reward/mean@1": 0.75}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    record = RunRecord(tmp_path)
    assert record.latest() == {"step": 2, "reward/mean": 0.5}
    assert record.curves() == {
        "reward/mean": {1: 0.25, 2: 0.5},
        "actor/grad_norm": {1: 2.0},
        "val-core/openai/gsm8k/reward/mean@1": {2: 0.75},
    }
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_damaged_configuration_or_metrics_file_does_not_hide_the_other_runs(tmp_path: Path) -> None:
    write_training(tmp_path / "good", rate=RATES["low"], seed=0)
    bad = write_training(tmp_path / "bad", rate=RATES["low"], seed=1)
    (bad / "config.yaml").write_text("trainer: [", encoding="utf-8")
    (bad / "metrics.jsonl").write_bytes(b"\xff\xfe\n[1]\n{}\n")
    for file in tmp_path.glob("*/trajectories/*"):
        file.write_bytes(b"no Parquet")  # the list of runs reads none
    runs = {run["key"]: run for run in RunCollection([tmp_path]).runs()["runs"]}
    assert (runs["good"]["step"], runs["good"]["held_out"]) == (6, pytest.approx(0.3))
    assert runs["bad"]["step"] is None
    assert runs["bad"]["changed"] == {}


def test_an_evaluation_that_has_not_ended_is_listed_without_pages(tmp_path: Path) -> None:
    write_training(tmp_path / "run", rate=RATES["low"], seed=0)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "rollout.journal").write_bytes(b"agent-loop journal")
    (tmp_path / "eval" / "trajectories.jsonl").touch()
    collection = RunCollection([tmp_path])
    entries = {run["key"]: (run["kind"], run["has_pages"]) for run in collection.runs()["runs"]}
    assert entries == {"eval": ("evaluation", False), "run": ("run", True)}
    assert [one["key"] for one in Evaluations(collection.folders).listed()] == ["run|val-3", "run|val-6"]
