"""Typical mistakes: each ends with one screen that names what is wrong, what was found and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_loop.storage.json_lines import write_lines
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from tests.cli.project import Command, make_project

FILES = {
    "torn.jsonl": '{"prompt": "x"}\n{"prompt": \n{"prompt": "y"}\n',
    "empty.jsonl": "",
    "columns.jsonl": '{"question_text": "x"}\n',
    "syntax.py": "def reward(output, row)\n    return 1\n",
    "raises.py": "limit = {}['limit']\n\ndef reward(output, row):\n    return 1.0\n",
    "one.py": "def reward(output):\n    return 1.0\n",
    "bare.py": "import agent_loop\n\n@agent_loop.function_tool\ndef bare(a: int) -> int:\n    return a\n",
    "untyped.py": "import agent_loop\n\n@agent_loop.function_tool\ndef untyped(a):\n    '''Same.'''\n    return a\n",
    "double.py": (
        "import agent_loop\n\n@agent_loop.function_tool\ndef double(a: int) -> int:\n"
        '    """Double a number.\n\n    Args:\n        a: A number.\n    """\n    return 2 * a\n'
    ),
    "words.py": 'def reward(output, row):\n    return "good"\n',
    "loops.yaml": "- name: mine\n  _target_: agent_loop.serve.AgentProgramLoop\n  program: agent.py:solve\n",
    "agent.py": "import a_package_that_is_missing\n\ndef solve(row, base_url, api_key):\n    return {}\n",
}

T, TOOLS = "train config.yaml ", "rollout.multi_turn.tools"
PROGRAM = T + "rollout.agent.agent_loop_config_path=loops.yaml rollout.agent.default_agent_loop=mine"
UNREACHABLE = "rollout config.yaml rollout.engine=openai rollout.server_urls=[http://127.0.0.1:9] --dry-run"
MISTAKES = {
    T + "rollout.temprature=1": "rollout.temprature | did you mean 'temperature'",
    T + "distillation.teachers.big.pth=x": "distillation.teachers.big.pth | did you mean 'path'",
    T + "rollout.n=four": "rollout.n is 'four' | valid integer",
    T + "rollout.n 4": "'rollout.n' | key=value",
    T + "rollout.temperature=-1": "rollout.temperature is -1 | greater than or equal to 0",
    "train confg.yaml": "'confg.yaml' does not exist | did you mean 'config.yaml'",
    T + "model.path=modle": "model.path is 'modle' | did you mean 'model'",
    T + "model.path=no_tokenizer": "model.path is 'no_tokenizer' | no tokenizer | model.tokenizer_path",
    T + "model.path=no_template": "'no_template' | no chat template | model.chat_template_path",
    T + "data.train_files=[row.jsonl]": "'row.jsonl' does not exist | give",
    T + "data.train_files=[torn.jsonl]": "torn.jsonl line 2 | not JSON",
    "sft config.yaml sft.files=[chats.jsonl]": "'chats.jsonl' does not exist | give",
    "sft config.yaml sft.files=[columns.jsonl]": "has no 'messages' | sft.messages_key",
    "eval config.yaml --data x/*.jsonl": "'x/*.jsonl' matches nothing",
    T + "data.train_files=[empty.jsonl]": "empty.jsonl | no rows",
    T + "data.train_files=[columns.jsonl]": "columns.jsonl | 'prompt' | data.prompt_key | question_text",
    T + "data.train_batch_size=64": "6 rows | data.train_batch_size=64 | lower",
    T + "reward.function=task.py:rewrad": "reward.function | task.py | did you mean 'reward'",
    T + "reward.function=one.py:reward": "reward.function is 'one.py:reward' | (output, row)",
    T + "reward.function=raises.py:reward": "reward.function | raises.py | KeyError | line 1",
    T + "reward.function=syntax.py:reward": "reward.function | syntax.py | SyntaxError | line 1",
    "rescore stored.jsonl --reward words.py:reward": "words.py:reward returned 'good' | number",
    T + TOOLS + "=[bare.py:bare]": "bare.py:bare | docstring",
    T + TOOLS + "=[untyped.py:untyped]": "untyped.py:untyped | 'a' | type",
    T + TOOLS + "=[double.py:double,double.py:double]": "both named 'double' | rename one",
    PROGRAM: "agent loop 'mine' | agent.py | a_package_that_is_missing",
    T + "rollout.engine=vlm": "rollout.engine is 'vlm' | vllm",
    UNREACHABLE: "rollout.server_urls | http://127.0.0.1:9 | start the server",
    T + "algorithm.adv_estimator=gpro": "algorithm.adv_estimator is 'gpro' | did you mean 'grpo'",
    T + "rollout.n=1": "rollout.n is 1 | algorithm.adv_estimator=grpo | at least 2",
    T + "actor_rollout_ref.rollout.top_k=20": "rollout.top_k is 20 | biased | set rollout.top_k=-1",
    T + "trainer.num_processes=2 placement.split.trainer=3": "placement.split | 3 | 2",
    T + "trainer.run_dir=used": "trainer.run_dir 'used' | --resume | --overwrite",
    "eval config.yaml --resume": "'runs/eval' | no evaluation | without --resume",
    T + "--resume-from runs/nowhere": "--resume-from is 'runs/nowhere' | does not exist",
    "show stored.jsonl --where reward=>1": "'reward=>1' | reward, which is a number | give a number after one of",
}
"""Command lines, and what their errors name, separated by `|`."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which all these mistakes can be made."""
    folder = tmp_path_factory.mktemp("mistakes")
    make_project(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, missing in {"no_tokenizer": "tokenizer.json", "no_template": "chat_template.jinja"}.items():
        shutil.copytree(folder / "model", folder / name)
        (folder / name / missing).unlink()
    (folder / "used" / "checkpoints").mkdir(parents=True)
    write_lines(folder / "stored.jsonl", [stored_trajectory()], split="rollout")
    return folder


def stored_trajectory() -> Trajectory:
    """Return a trajectory as the files of a rollout hold it."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    output = AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[7, 8],
        response_mask=[1, 1],
        response_logprobs=[-0.5, -0.25],
        messages=messages,
    )
    return Trajectory(output, {"raw_prompt": messages[:1]}, 2, 1, 0.5, {"length": 2})


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_explained_on_one_screen(
    project: Path, shell: Command, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    result = shell(*line.split(), exit_code=1 if line.startswith("rescore") else 2)
    output = result.out + result.err
    shown = " ".join(output.split())
    assert [name for name in MISTAKES[line].split(" | ") if name not in shown] == [], output
    assert "Traceback" not in output
    assert len(output.splitlines()) <= 24, output
    assert not (project / "run").exists()


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # an import of torch raises
from agent_loop.cli import main
for line in json.load(sys.stdin):
    sys.argv = ["agent-loop", *line.split()]
    try:
        main()
    except SystemExit as ended:
        assert ended.code, line
    except BaseException as error:
        raise AssertionError(line) from error
"""


def test_every_mistake_is_found_without_torch(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps([*MISTAKES]),
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
