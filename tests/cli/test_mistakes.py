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
TOOLS = "rollout.multi_turn.tools"


MISTAKES: dict[str, tuple[str, tuple[str, ...]]] = {
    "misspelled-key": (
        "train config.yaml rollout.temprature=1",
        ("rollout.temprature", "did you mean 'temperature'"),
    ),
    "misspelled-key-of-a-teacher": (
        "train config.yaml distillation.teachers.big.pth=x",
        ("distillation.teachers.big.pth", "did you mean 'path'"),
    ),
    "wrong-type": ("train config.yaml rollout.n=four", ("rollout.n is 'four'", "valid integer")),
    "override-without-value": ("train config.yaml rollout.n 4", ("'rollout.n'", "key=value")),
    "negative-temperature": (
        "train config.yaml rollout.temperature=-1",
        ("rollout.temperature is -1", "greater than or equal to 0"),
    ),
    "missing-config": ("train confg.yaml", ("'confg.yaml' does not exist", "did you mean 'config.yaml'")),
    "missing-model": (
        "train config.yaml model.path=modle",
        ("model.path is 'modle'", "did you mean 'model'"),
    ),
    "missing-tokenizer": (
        "train config.yaml model.path=no_tokenizer",
        ("model.path is 'no_tokenizer'", "no tokenizer", "model.tokenizer_path"),
    ),
    "no-chat-template": (
        "train config.yaml model.path=no_template",
        ("'no_template'", "no chat template", "model.chat_template_path"),
    ),
    "missing-rows": (
        "train config.yaml data.train_files=[row.jsonl]",
        ("'row.jsonl' does not exist", "give"),
    ),
    "torn-line-of-rows": (
        "train config.yaml data.train_files=[torn.jsonl]",
        ("torn.jsonl line 2", "not JSON"),
    ),
    "missing-conversations": (
        "sft config.yaml sft.files=[chats.jsonl]",
        ("'chats.jsonl' does not exist", "give"),
    ),
    "rows-that-are-no-conversations": (
        "sft config.yaml sft.files=[columns.jsonl]",
        ("has no 'messages'", "sft.messages_key"),
    ),
    "glob-without-files": (
        "eval config.yaml --data x/*.jsonl",
        ("'x/*.jsonl' matches nothing",),
    ),
    "empty-rows": ("train config.yaml data.train_files=[empty.jsonl]", ("empty.jsonl", "no rows")),
    "missing-column": (
        "train config.yaml data.train_files=[columns.jsonl]",
        ("columns.jsonl", "'prompt'", "data.prompt_key", "question_text"),
    ),
    "batch-larger-than-the-rows": (
        "train config.yaml data.train_batch_size=64",
        ("6 rows", "data.train_batch_size=64", "lower"),
    ),
    "missing-reward": (
        "train config.yaml reward.function=task.py:rewrad",
        ("reward.function", "task.py", "did you mean 'reward'"),
    ),
    "reward-with-one-parameter": (
        "train config.yaml reward.function=one.py:reward",
        ("reward.function is 'one.py:reward'", "(output, row)"),
    ),
    "reward-file-raises": (
        "train config.yaml reward.function=raises.py:reward",
        ("reward.function", "raises.py", "KeyError", "line 1"),
    ),
    "syntax-error": (
        "train config.yaml reward.function=syntax.py:reward",
        ("reward.function", "syntax.py", "SyntaxError", "line 1"),
    ),
    "reward-is-no-number": (
        "rescore stored.jsonl --reward words.py:reward",
        ("words.py:reward returned 'good'", "number"),
    ),
    "tool-without-docstring": (f"train config.yaml {TOOLS}=[bare.py:bare]", ("bare.py:bare", "docstring")),
    "tool-without-types": (
        f"train config.yaml {TOOLS}=[untyped.py:untyped]",
        ("untyped.py:untyped", "'a'", "type"),
    ),
    "tool-twice": (
        f"train config.yaml {TOOLS}=[double.py:double,double.py:double]",
        ("both named 'double'", "rename one"),
    ),
    "program-cannot-be-imported": (
        "train config.yaml rollout.agent.agent_loop_config_path=loops.yaml rollout.agent.default_agent_loop=mine",
        ("agent loop 'mine'", "agent.py", "a_package_that_is_missing"),
    ),
    "unknown-engine": ("train config.yaml rollout.engine=vlm", ("rollout.engine is 'vlm'", "vllm")),
    "unreachable-server": (
        "rollout config.yaml rollout.engine=openai rollout.server_urls=[http://127.0.0.1:9] --dry-run",
        ("rollout.server_urls", "http://127.0.0.1:9", "start the server"),
    ),
    "unknown-estimator": (
        "train config.yaml algorithm.adv_estimator=gpro",
        ("algorithm.adv_estimator is 'gpro'", "did you mean 'grpo'"),
    ),
    "groups-of-one": (
        "train config.yaml rollout.n=1",
        ("rollout.n is 1", "algorithm.adv_estimator=grpo", "at least 2"),
    ),
    "truncated-samples": (
        "train config.yaml actor_rollout_ref.rollout.top_k=20",
        ("rollout.top_k is 20", "biased", "set rollout.top_k=-1"),
    ),
    "placement-that-does-not-add-up": (
        "train config.yaml trainer.num_processes=2 placement.split.trainer=3",
        ("placement.split", "3", "2"),
    ),
    "run-folder-in-use": (
        "train config.yaml trainer.run_dir=used",
        ("trainer.run_dir 'used'", "--resume", "--overwrite"),
    ),
    "nothing-to-resume": ("eval config.yaml --resume", ("'runs/eval'", "no evaluation", "without --resume")),
    "resume-from-nowhere": (
        "train config.yaml --resume-from runs/nowhere",
        ("--resume-from is 'runs/nowhere'", "does not exist"),
    ),
    "wrong-condition": (
        "show stored.jsonl --where reward=>1",
        ("'reward=>1'", "reward, which is a number", "'>1'", "give a number after one of"),
    ),
}


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


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained_on_one_screen(
    project: Path, shell: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    line, names = MISTAKES[name]
    result = shell(*line.split())
    assert result.exit_code != 0
    output = result.out + result.err
    shown = " ".join(output.split())
    assert [name for name in names if name not in shown] == [], output
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
        input=json.dumps([line for line, _ in MISTAKES.values()]),
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
