"""`agent-loop init`, `make-model` and `demo`, in a checkout and from a wheel: folders that train as they are."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_loop.cli.demo import copy_examples, examples_folder
from agent_loop.cli.init import Starter
from examples.catalog import RECIPES
from tests.cli.project import ROOT, Command, write_json_lines
from tests.helpers import user

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
    answer = {"role": "assistant", "content": "A word."}
    write_json_lines(folder / "rows.jsonl", rows)
    demos = [{"messages": [*user(row["prompt"]), answer]} for row in rows]
    write_json_lines(folder / "demos.jsonl", demos)
    (folder / "task.py").write_text(LOOKUP, encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


def run_unittest(folder: Path) -> str:
    command = [sys.executable, "-m", "unittest"]
    tests = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert tests.returncode == 0, tests.stderr
    return tests.stderr


def run_line(line: str, *, cwd: Path, installed: Path, status: int = 0) -> str:
    """Run a command line of the installed package, and return its output."""
    words = shlex.split(line)
    assert words[0] == "agent-loop"
    command, environment = (
        [str(installed / "bin" / words[0]), *words[1:]],
        os.environ | {"OMP_NUM_THREADS": "1"},
    )
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, line + done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_a_model_is_made_for_rows_alone(task: Path, command: Command) -> None:
    command("make-model", "model", "--from-rows", "rows.jsonl")
    model, tokenizer = load(task / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode("Ein Wört?")) == "Ein Wört?"


def test_supervised_steps_change_the_weights_and_a_seed_gives_the_same_model(
    task: Path, command: Command
) -> None:
    arguments = ["--from-rows", "rows.jsonl", "--demonstrations", "demos.jsonl"]
    for name, steps in (("start", 0), ("one", 2), ("other", 2)):
        command("make-model", name, *arguments, "--steps", str(steps), "--tool", "task.py:lookup")
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
    assert complaint in command("make-model", *arguments, exit_code=2).err
    assert not (task / "model").exists()


def test_a_folder_with_files_is_refused(task: Path, command: Command) -> None:
    assert "exists already" in command("init", str(task), exit_code=2).err
    assert not (task / "config.yaml").exists()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("starter", list(Starter))
def test_a_folder_for_a_model_of_the_user_has_rows_and_passing_tests(
    task: Path, command: Command, starter: Starter
) -> None:
    command("init", "mine", "--template", starter.value, "--model", "my/model")
    folder = task / "mine"
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert config["model"] == {"path": "my/model", "dtype": "bfloat16", "lora_rank": 16}
    assert config["actor"]["lr"] == 1e-4
    assert (config["rollout"]["prompt_length"], config["rollout"]["response_length"]) == (1024, 512)
    train, val = (
        {json.loads(line)["order"] for line in (folder / name).read_text(encoding="utf-8").splitlines()}
        for name in ("rows.jsonl", "val_rows.jsonl")
    )
    assert train.isdisjoint(val)
    assert "OK" in run_unittest(folder)


def test_the_tests_of_the_folder_pass_with_the_reward_of_the_tutorial(task: Path, command: Command) -> None:
    page = (ROOT / "docs" / "first-task.md").read_text(encoding="utf-8")
    reward, test = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    command("init", "mine", "--model", "my/model")
    for name, before, code in (("task.py", "def reward(", reward), ("test_task.py", "if __name__", test)):
        path = task / "mine" / name
        kept, found, rest = path.read_text(encoding="utf-8").partition(before)
        path.write_text(kept + code + (found + rest if code is test else ""), encoding="utf-8")
    assert "Ran 4 tests" in run_unittest(task / "mine")


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


def test_the_list_names_every_example_and_a_misspelled_one_is_refused(
    command: Command,
) -> None:
    result = command("demo", "--list")
    for name, recipe in RECIPES.items():
        assert re.search(rf"^{name} +{re.escape(recipe.about)}$", result.out, flags=re.MULTILINE)
        assert recipe.needs in result.out
    result = command("demo", "calculater", exit_code=2)
    assert "did you mean 'calculator'?" in result.err
    assert "agent-loop demo --list" in result.err
    assert not Path("runs").exists()


def test_a_copy_keeps_files_that_were_edited_and_names_them(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, width=200)
    copy_examples(examples_folder(), tmp_path, console=console)
    (tmp_path / "calculator" / "task.py").write_text("edited", encoding="utf-8")
    assert not (tmp_path / "gsm8k").exists()
    copy_examples(examples_folder(), tmp_path, console=console)
    assert (tmp_path / "calculator" / "task.py").read_text(encoding="utf-8") == "edited"
    [note] = file.getvalue().splitlines()
    assert note.startswith(f"uses {tmp_path / 'calculator' / 'task.py'} as found")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_package_runs_the_demo_and_a_new_task(tmp_path: Path, installed: Path) -> None:
    first = run_line("agent-loop demo --steps 2", cwd=tmp_path, installed=installed, status=1)
    assert "NOT passed" in first  # two steps are too few
    made = tmp_path / "runs" / "demo"
    assert (made / "report.html").is_file()
    assert (made / "examples" / "two_hop_lookup" / "task.py").is_file()
    assert "128 trajectories" in run_line(
        "agent-loop show train --step 2 --limit 2", cwd=made, installed=installed
    )

    run_line("agent-loop init shelf", cwd=tmp_path, installed=installed)
    run_line(
        "agent-loop train config.yaml trainer.total_steps=2", cwd=tmp_path / "shelf", installed=installed
    )
    assert "Examples" in run_line("agent-loop view --help", cwd=tmp_path, installed=installed)
    page = tmp_path / "page.html"
    run_line(f"agent-loop view . --export {page}", cwd=tmp_path / "shelf", installed=installed)
    assert "<html" in page.read_text(encoding="utf-8")
