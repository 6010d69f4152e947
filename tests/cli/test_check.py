"""`agent-loop check`, as a shell runs it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_loop.checks import check_model
from agent_loop.cli import app
from agent_loop.errors import ConfigError
from tests.families.zoo import FAMILIES
from tests.servers.tiny_embedded import tiny_model
from tests.tools.sandboxes import SMALL, python_tool

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

CONFIG = """
model: {path: model, device: cpu}
rollout: {prompt_length: 64, response_length: 64}
"""


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
    result = CliRunner().invoke(app, ["check", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_good_interaction_passes_with_the_first_row_that_names_it(config: str) -> None:
    code, output = run("interaction", config, "--name", "gsm8k")
    assert code == 0, output
    assert "interaction 'gsm8k': 12 passed, 0 failed, 0 skipped" in output


def test_a_faulty_interaction_fails(config: str) -> None:
    code, output = run("interaction", config, "--json", "--answer", "41")
    assert code == 1
    verdicts = {result["name"]: result["verdict"] for result in json.loads(output)["interaction 'rude'"]}
    assert verdicts["every turn gets a valid reply"] == "failed"


def test_an_unknown_name_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match="there is no interaction 'rud'; did you mean 'rude'"):
        run("interaction", config, "--name", "rud")
    with pytest.raises(ConfigError, match="the configuration has no interactions"):
        run("interaction", config, "rollout.multi_turn.interaction_config_path=null")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_of_computing_a_known_model_passes(tmp_path: Path, dtype: str) -> None:
    tiny_model(initializer_range=0.06).save_pretrained(tmp_path / "model")
    code, output = run("model", str(tmp_path / "model"), "--dtype", dtype, "--max-model-len", "128")
    assert code == 0, output
    assert "model 'Qwen3ForCausalLM': 7 passed, 0 failed, 0 skipped" in output


def test_ways_that_the_table_does_not_have_are_reported_and_do_not_fail() -> None:
    report = asyncio.run(check_model(FAMILIES["mamba"].build(), max_model_len=64))
    assert not report.failures
    skipped = {"cache=shared is exact", "share_prefixes is exact"}
    assert skipped <= set(report.named("skipped"))


def test_a_model_that_the_table_is_wrong_about_fails() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + output.roll(1, dims=1)
    )
    failed = asyncio.run(check_model(model, max_model_len=64)).named("failed")
    assert {"cache=shared is exact", "padded rows are exact"} <= set(failed)


def sandbox(*settings: str) -> tuple[int, list[str]]:
    code, output = run("sandbox", f"python={SMALL['python']}", *settings)
    return code, output.splitlines()


def test_a_machine_that_isolates_passes() -> None:
    python_tool()
    code, lines = sandbox()
    assert code == 0
    assert lines[-1] == "sandbox: 1 passed, 0 failed, 0 skipped"


def test_a_sandbox_that_cannot_be_started_is_printed_with_the_reason() -> None:
    code, lines = sandbox("python=/no/python")
    assert code == 1
    assert "/no/python could not be started: " in lines[0]
    code, lines = sandbox("python=/no/python", "--json")
    assert code == 1
    (result,) = json.loads("\n".join(lines))["sandbox"]
    assert result["verdict"] == "failed"


def test_a_good_engine_passes(tmp_path: Path) -> None:
    tiny_model(initializer_range=0.06).save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    code, output = run("server", str(tmp_path / "config.yaml"), "--model", str(tmp_path / "model"))
    assert code == 0, output
    assert "passed   completions and their log-probs are those of the reference model" in output
    assert "server 'embedded-0': 19 passed, 0 failed, 1 skipped" in output
