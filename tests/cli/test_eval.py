from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_loop.config import ModelConfig
from agent_loop.storage import StoredRun
from agent_loop.storage.json_lines import read_lines
from agent_loop.training.checkpoint import save_checkpoint
from agent_loop.training.policy import load_policy
from tests.cli.project import Command, Result, make_eval_project

ALL = [(group, rollout) for group in range(6) for rollout in range(2)]


Evaluate = Callable[..., Result]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_eval_project(folder)
    return folder


@pytest.fixture
def evaluate(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Command) -> Evaluate:
    """Return a function that runs `agent-loop eval config.yaml ...` in a new project."""
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return partial(shell, "eval", "config.yaml")


def trajectories(folder: str = "runs/eval") -> list[dict[str, Any]]:
    lines = Path(folder, "trajectories.jsonl")  # is there until the evaluation has ended
    return list(read_lines(lines) if lines.exists() else StoredRun(folder).rows())


def keys(folder: str = "runs/eval") -> list[tuple[int, int]]:
    return [(record["group"], record["rollout"]) for record in trajectories(folder)]


def calls() -> Counter[str]:
    return Counter(line.split()[0] for line in Path("calls.log").read_text().splitlines())


@contextmanager
def file(name: str, content: str) -> Iterator[None]:
    Path(name).write_text(content)
    yield
    Path(name).unlink()


def test_an_evaluation_writes_trajectories_and_a_summary_with_categories(evaluate: Evaluate) -> None:
    result = evaluate("--by", "level", "--table-rows", "2")
    for shown in ("pass@1", "pass@2", "75.0%", "100.0%", "easy", "hard", "question 1", "and 4 more rows"):
        assert shown in result.out
    assert keys() == ALL
    summary = json.loads(Path("runs/eval/summary.json").read_text())
    assert summary["evaluation"]["scores"]["pass_at_k"]["1"]["value"] == 0.75
    assert summary["evaluation"]["scores"]["pass_at_k"]["2"]["value"] == 1.0
    levels = summary["categories"]["level"]
    assert {name: scores["pass_at_k"]["1"]["value"] for name, scores in levels.items()} == {
        "easy": 1,
        "hard": 0.5,
    }
    assert not Path("runs/eval/rollout.journal").exists()


def test_a_batch_reward_is_called_once_per_row_and_never_again_for_the_same_samples(
    evaluate: Evaluate,
) -> None:
    options = ["reward.function=script.py:together", "reward.batch=true"]
    with file("interrupt", "5"), file("hang", "34"):
        evaluate(*options, exit_code=130)
    assert sorted(Path("judged.log").read_text().splitlines()) == ["0 0", "1 1", "2 2"]

    evaluate(*options, "--resume")
    assert sorted(Path("judged.log").read_text().splitlines()) == [f"{n} {n}" for n in range(6)]
    assert keys() == ALL
    summary = json.loads(Path("runs/eval/summary.json").read_text())
    assert summary["evaluation"]["scores"]["pass_at_k"]["2"]["value"] == 1.0


def test_evaluation_uses_the_sampling_parameters_of_validation(evaluate: Evaluate) -> None:
    evaluate("rollout.temperature=1", "rollout.val.temperature=0.25", "-n", "1")
    assert {line.split()[1] for line in Path("calls.log").read_text().splitlines()} == {"0.25"}
    assert {record["stop_reason"] for record in trajectories()} == {"answered"}

    evaluate("rollout.val.max_turn_tokens=1", "--overwrite")
    assert {record["segments"][1]["num_tokens"] for record in trajectories()} == {1}


def test_an_evaluation_is_not_overwritten_by_accident(evaluate: Evaluate) -> None:
    evaluate()
    again = evaluate(exit_code=2)
    assert "holds a finished evaluation; resume it with --resume" in again.err
    last = evaluate("--overwrite", "-n", "1", "--json")
    assert json.loads(last.out)["evaluation"]["scores"]["num_samples"] == len(trajectories()) == 6
    assert "results in runs/eval" in last.err


def test_ctrl_c_keeps_finished_trajectories_and_resume_runs_only_the_others(evaluate: Evaluate) -> None:
    with file("interrupt", "5"), file("hang", "34"):
        stopped = evaluate(exit_code=130)
    ended = keys()
    assert sorted(ended) == [(group, rollout) for group in range(3) for rollout in range(2)]
    assert "stopped; the 6 finished trajectories are in runs/eval/trajectories.jsonl" in stopped.out
    assert "--resume" in stopped.out
    unfinished = evaluate(exit_code=2)
    assert "holds an unfinished evaluation" in unfinished.err

    before = {(r["group"], r["rollout"]): r["segments"] for r in trajectories()}
    evaluate("--resume")
    assert keys() == ALL
    assert [r["segments"] for r in trajectories() if (r["group"], r["rollout"]) in before] == [
        before[key] for key in sorted(before)
    ]
    assert [calls()[number] for number in "012"] == [2, 2, 2]


def test_resume_shows_a_finished_evaluation_without_a_server(evaluate: Evaluate) -> None:
    evaluate()
    Path("script.py").write_text("import nothing_of_this_name")
    shown = evaluate("--resume", "--by", "level")
    assert "easy" in shown.out
    assert sum(calls().values()) == 12
    other = evaluate("--resume", "-n", "3", "rollout.val.top_p=0.5", exit_code=2)
    assert "holds another evaluation: num_samples, rollout.val.top_p changed" in other.err


def test_too_many_failures_stop_the_evaluation_and_resume_runs_the_failed_rows_again(
    evaluate: Evaluate,
) -> None:
    with file("breaks", ""):
        broken = evaluate(exit_code=2)
    assert "no answer is good enough" in broken.err
    assert "--resume" in broken.out
    evaluate("--resume")
    assert None not in [record["reward"] for record in trajectories()]
    assert keys() == ALL


def test_two_evaluations_are_compared_row_by_row(evaluate: Evaluate) -> None:
    evaluate("--out", "base", "-n", "1", "--max-rows", "4")
    result = evaluate("--out", "new", "--compare", "base", "--by", "level")
    assert "better than base by" in result.out
    comparison = json.loads(Path("new/summary.json").read_text())["comparison"]
    assert (comparison["total"]["num_rows"], comparison["other_model"]) == (4, "model")
    # All answers of `base` are correct. The new answers of rows 1 and 3 are correct every second time.
    assert comparison["total"]["pass_at_1"]["value"] == -0.25
    assert comparison["categories"]["level"]["hard"]["pass_at_1"]["value"] == -0.5
    nothing = evaluate("--out", "third", "--compare", "nowhere", exit_code=2)
    assert "give a finished evaluation's folder" in nothing.err
    Path("others.jsonl").write_text('{"prompt": "question 7"}')
    others = evaluate("--out", "third", "--compare", "base", "--data", "others.jsonl", exit_code=2)
    assert "shares no rows" in others.err
    assert not Path("third").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--by", "levle"], "did you mean 'level'"),
        (["--checkpoint", "nowhere"], "'nowhere' does not exist"),
        (["--checkpoint", "."], "holds no run"),
        (["--checkpoint", "model", "--model", "model"], "both select a model"),
        (["--checkpoint", "model", "rollout.server_urls=[http://h:1]"], "have their own weights"),
        (["--resume", "--overwrite"], "--resume and --overwrite"),
        (["--out", "rows.jsonl"], "'rows.jsonl', which is a file"),
        (["rollout.val.max_turn_tokens=0"], "rollout.val.max_turn_tokens is 0"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(
    evaluate: Evaluate, arguments: list[str], complaint: str
) -> None:
    result = evaluate(*arguments, exit_code=2)
    assert complaint in result.err
    assert not Path("runs").exists()
    assert not Path("calls.log").exists()


class SavedModel:
    """Learner whose checkpoint holds a model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def save(self, folder: Path) -> None:
        self._model.save_pretrained(folder / "model")


def save_step(model: Any, *, config: dict[str, Any]) -> Path:
    """Write a checkpoint of the run `trained`."""
    tokenizer = AutoTokenizer.from_pretrained("model")
    return save_checkpoint(
        Path("trained"), step=7, learner=SavedModel(model), tokenizer=tokenizer, config=config, keep=1
    )


def test_a_checkpoint_may_be_a_model_folder_a_step_or_a_run(evaluate: Evaluate) -> None:
    step = save_step(AutoModelForCausalLM.from_pretrained("model"), config={})

    for number, (given, used) in enumerate(
        [("model", "model"), (str(step), str(step / "model")), ("trained", str(step / "model"))]
    ):
        result = evaluate("--checkpoint", given, "--max-rows", "1", "--json", "--out", f"out{number}")
        assert json.loads(result.out)["model"] == used
    (step / "model" / "config.json").unlink()
    damaged = evaluate("--checkpoint", "trained", "--out", "damaged", exit_code=2)
    assert "config.json is missing" in damaged.err


def test_a_checkpoint_of_adapters_is_evaluated_with_its_base_model(evaluate: Evaluate) -> None:
    settings = ModelConfig(path="model", lora_rank=2, device="cpu")
    step = save_step(load_policy(settings), config={"model": settings.model_dump()})

    for out in ("first", "second"):
        result = evaluate("--checkpoint", "trained", "--max-rows", "1", "--json", "--out", out)
        assert json.loads(result.out)["model"] == str(step / "merged")
