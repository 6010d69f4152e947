"""`agent-loop check server`, as a shell runs it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from agent_loop.cli import app
from tests.servers.tiny_embedded import tiny_model

CONFIG = """
model: {path: model, device: cpu}
rollout: {prompt_length: 64, response_length: 64}
"""
SCRIPT = """
from agent_loop.servers.scripted import ScriptedReply

def answer(request):
    return ScriptedReply(token_ids=[1, 2, 3])
"""


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", "server", *arguments])
    return result.exit_code, result.stdout


def test_a_good_engine_passes(tmp_path: Path) -> None:
    tiny_model(initializer_range=0.06).save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    code, output = run(str(tmp_path / "config.yaml"), "--model", str(tmp_path / "model"))
    assert code == 0, output
    assert "passed   greedy completions match the reference model" in output
    assert "server 'embedded-0': 25 passed, 0 failed, 1 skipped" in output


def test_a_faulty_engine_fails(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    code, output = run(
        str(tmp_path / "config.yaml"),
        f"model.path={tmp_path / 'model'}",
        "rollout.engine=scripted",
        f"rollout.engine_kwargs.script={tmp_path / 'script.py'}:answer",
        "--no-reference",
        "--json",
        "--timeout-s=5",
    )
    assert code == 1
    verdicts = {result["name"]: result["verdict"] for result in json.loads(output)["server 'scripted-0'"]}
    assert verdicts["a completion has valid token ids and ends at max_tokens"] == "failed"
    assert verdicts["log-probs match the reference model"] == "skipped"
