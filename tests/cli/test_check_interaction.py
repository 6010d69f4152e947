"""`agent-loop check interaction`, as a shell runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.errors import ConfigError

INTERACTIONS = """
interaction:
  - class_name: gsm8k
  - name: rude
    class_name: FOLDER/rude.py:Rude
"""
RUDE = """
from agent_loop import BaseInteraction

class Rude(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return "no"
"""
ROW = {"prompt": "6 * 7?", "interaction_kwargs": {"name": "gsm8k", "ground_truth": "42"}}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "rude.py").write_text(RUDE)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "interactions.yaml").write_text(INTERACTIONS.replace("FOLDER", str(tmp_path)))
    (tmp_path / "config.yaml").write_text(
        f"data: {{train_files: [{tmp_path}/rows.jsonl]}}\n"
        f"rollout: {{multi_turn: {{interaction_config_path: {tmp_path}/interactions.yaml}}}}\n"
    )
    return str(tmp_path / "config.yaml")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", "interaction", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def test_a_good_interaction_passes_with_the_first_row_that_names_it(config: str) -> None:
    code, output = run(config, "--name", "gsm8k")
    assert code == 0, output
    assert "interaction 'gsm8k': 12 passed, 0 failed, 1 skipped" in output


def test_a_faulty_interaction_fails(config: str) -> None:
    code, output = run(config, "--json", "--answer", "41")
    assert code == 1
    verdicts = {result["name"]: result["verdict"] for result in json.loads(output)["interaction 'rude'"]}
    assert verdicts["every turn gets a valid reply"] == "failed"


def test_an_unknown_name_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match="there is no interaction 'rud'; did you mean 'rude'"):
        run(config, "--name", "rud")
    with pytest.raises(ConfigError, match="the configuration has no interactions"):
        run(config, "rollout.multi_turn.interaction_config_path=null")
