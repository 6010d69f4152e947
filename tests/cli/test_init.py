"""`agent-loop init` and `agent-loop make-model`: a folder that trains as it is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_loop.cli.init import Starter
from tests.cli.installed import ROOT, installed, run_line
from tests.cli.project import Command

assert installed
LOOKUP = """
from agent_loop import function_tool

@function_tool
def lookup(word: str) -> str:
    \"\"\"Look up a word.

    Args:
        word: The word.
    \"\"\"
    return word[::-1]
"""


@pytest.fixture
def task(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with rows, demonstrations and a tool, which is the working directory."""
    folder = tmp_path / "new"
    folder.mkdir()
    rows = [{"prompt": f"What is word {n}?"} for n in range(8)]
    answers = [
        {
            "messages": [
                {"role": "user", "content": f"What is word {n}?"},
                {"role": "assistant", "content": "A word."},
            ]
        }
        for n in range(8)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "demos.jsonl").write_text("\n".join(map(json.dumps, answers)), encoding="utf-8")
    (folder / "task.py").write_text(LOOKUP, encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_a_model_is_made_for_rows_alone(task: Path, command: Command) -> None:
    result = command("make-model", "model", "--from-rows", "rows.jsonl")
    assert result.exit_code == 0, result.err
    model, tokenizer = load(task / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode("Ein Wört?")) == "Ein Wört?"


def test_supervised_steps_change_the_weights_and_a_seed_gives_the_same_model(
    task: Path, command: Command
) -> None:
    arguments = ["--from-rows", "rows.jsonl", "--demonstrations", "demos.jsonl"]
    for name, steps in (("start", 0), ("one", 2), ("other", 2)):
        result = command("make-model", name, *arguments, "--steps", str(steps), "--tool", "task.py:lookup")
        assert result.exit_code == 0, result.err
    start, one, other = (load(task / name)[0].state_dict() for name in ("start", "one", "other"))
    assert any(not start[name].equal(one[name]) for name in start)
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["model"], "give --from-rows"),
        (["task.py", "--from-rows", "rows.jsonl"], "'task.py' exists already"),
        (["model", "--from-rows", "rows.jsonl", "--tool", "task.py:absent"], "absent"),
    ],
    ids=["no-rows", "existing-file", "missing-tool"],
)
def test_a_mistake_is_explained_before_anything_is_written(
    task: Path, command: Command, arguments: list[str], complaint: str
) -> None:
    result = command("make-model", *arguments)
    assert result.exit_code == 2
    assert complaint in result.err
    assert not (task / "model").exists()


def test_a_folder_with_files_is_refused(task: Path, command: Command) -> None:
    result = command("init", str(task))
    assert result.exit_code == 2
    assert "exists already" in result.err
    assert not (task / "config.yaml").exists()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("starter", list(Starter))
def test_a_folder_for_a_model_of_the_user_has_rows_and_passing_tests(
    task: Path, command: Command, starter: Starter
) -> None:
    result = command("init", "mine", "--template", starter.value, "--model", "my/model")
    assert result.exit_code == 0, result.err
    folder = task / "mine"
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["model"] == {"path": "my/model", "dtype": "bfloat16", "lora_rank": 16}
    assert config["actor"]["lr"] == 1e-4
    assert (config["rollout"]["prompt_length"], config["rollout"]["response_length"]) == (1024, 512)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    val_rows = [
        json.loads(line) for line in (folder / "val_rows.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert not {row["order"] for row in rows} & {row["order"] for row in val_rows}
    tests = subprocess.run(
        [sys.executable, "-m", "unittest"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert tests.returncode == 0, tests.stderr
    assert "OK" in tests.stderr


def test_the_tests_of_the_folder_pass_with_the_reward_of_the_tutorial(task: Path, command: Command) -> None:
    page = (ROOT / "docs" / "first-task.md").read_text(encoding="utf-8")
    reward, test = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    result = command("init", "mine", "--model", "my/model")
    assert result.exit_code == 0, result.err
    for name, before, code in (("task.py", "def reward(", reward), ("test_task.py", "if __name__", test)):
        path = task / "mine" / name
        kept, found, rest = path.read_text(encoding="utf-8").partition(before)
        path.write_text(kept + code + (found + rest if code is test else ""), encoding="utf-8")
    tests = subprocess.run(
        [sys.executable, "-m", "unittest"], cwd=task / "mine", capture_output=True, text=True, check=False
    )
    assert tests.returncode == 0, tests.stderr
    assert "Ran 4 tests" in tests.stderr


def success_of(run: Path) -> list[float]:
    """Return the success on held-out prompts at each evaluation."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["val/reward/success_share"] for line in lines if "val/reward/success_share" in line]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tutorial_ends_with_a_trained_task(tmp_path: Path, installed: Path) -> None:
    page = (ROOT / "docs" / "first-task.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)
    printed, cwd = "", tmp_path
    for line in "".join(blocks).splitlines():
        if line.startswith("cd "):
            cwd = cwd / line.removeprefix("cd ")
        elif not line.startswith(("pip install", "agent-loop view")):  # (the page is served until Ctrl-C)
            printed += run_line(line, cwd=cwd, installed=installed)
    assert "parameters" in printed
    assert "is followed" in printed or "part_of_order" in printed
    first, last = success_of(tmp_path / "shelf" / "run")[0], success_of(tmp_path / "shelf" / "run")[-1]
    assert first < 0.4
    assert last > 0.8


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("starter", [each for each in Starter if each is not Starter.TOOL])
def test_a_folder_of_each_kind_trains_as_it_is(tmp_path: Path, starter: Starter, installed: Path) -> None:
    run_line(f"agent-loop init shelf --template {starter.value}", cwd=tmp_path, installed=installed)
    folder = tmp_path / "shelf"
    run_line("agent-loop train config.yaml trainer.total_steps=10", cwd=folder, installed=installed)
    success = success_of(folder / "run")
    assert success[-1] > success[0]
