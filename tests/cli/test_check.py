"""The commands that check models, servers, sandboxes, interactions, tasks and chat templates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agent_loop.checks import check_model
from agent_loop.cli import app
from agent_loop.errors import ConfigError
from tests.cli.project import Command
from tests.environments.sums import use_sums
from tests.families.zoo import FAMILIES
from tests.helpers import HERMES_TEMPLATE, small_tokenizer
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


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_good_interaction_passes_with_the_first_row_that_names_it(config: str) -> None:
    code, output = check("interaction", config, "--name", "gsm8k")
    assert code == 0, output
    assert "interaction 'gsm8k': 12 passed, 0 failed, 0 skipped" in output


def test_a_faulty_interaction_fails(config: str) -> None:
    code, output = check("interaction", config, "--json", "--answer", "41")
    assert code == 1
    verdicts = {result["name"]: result["verdict"] for result in json.loads(output)["interaction 'rude'"]}
    assert verdicts["every turn gets a valid reply"] == "failed"


def test_an_unknown_name_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match="there is no interaction 'rud'; did you mean 'rude'"):
        check("interaction", config, "--name", "rud")
    with pytest.raises(ConfigError, match="the configuration has no interactions"):
        check("interaction", config, "rollout.multi_turn.interaction_config_path=null")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_of_computing_a_known_model_passes(tmp_path: Path, dtype: str) -> None:
    tiny_model(initializer_range=0.06).save_pretrained(tmp_path / "model")
    code, output = check("model", str(tmp_path / "model"), "--dtype", dtype, "--max-model-len", "128")
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
    code, output = check("sandbox", f"python={SMALL['python']}", *settings)
    return code, output.splitlines()


def test_a_machine_that_isolates_passes_and_a_sandbox_that_cannot_start_fails_with_the_reason() -> None:
    python_tool()
    code, lines = sandbox()
    assert (code, lines[-1]) == (0, "sandbox: 1 passed, 0 failed, 0 skipped")
    code, lines = sandbox("python=/no/python")
    assert (code, "/no/python could not be started: " in lines[0]) == (1, True)
    code, lines = sandbox("python=/no/python", "--json")
    (result,) = json.loads("\n".join(lines))["sandbox"]
    assert (code, result["verdict"]) == (1, "failed")


def test_a_good_engine_passes(tmp_path: Path) -> None:
    tiny_model(initializer_range=0.06).save_pretrained(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG)
    code, output = check("server", str(tmp_path / "config.yaml"), "--model", str(tmp_path / "model"))
    assert code == 0, output
    assert "passed   completions and their log-probs are those of the reference model" in output
    assert "server 'embedded-0': 19 passed, 0 failed, 1 skipped" in output


@pytest.fixture
def suites(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a command that knows a suite of sums and one that is not installed."""
    use_sums(monkeypatch)
    return command


def test_tasks_lists_suites_and_how_to_install_those_that_are_missing(suites: Command) -> None:
    result = suites("tasks")
    [sums] = [line for line in result.out.splitlines() if line.startswith("│ sums")]
    assert [cell.strip() for cell in sums.split("│")[1:4]] == ["sums", "4", "sums of two numbers"]
    [absent] = [line for line in result.out.splitlines() if line.startswith("│ absent")]
    assert absent.split("│")[2].strip() == "not installed"
    assert 'pip install "agent-loop[absent]"' in result.out


def test_tasks_show_lists_the_tasks_and_options_of_a_suite(suites: Command) -> None:
    result = suites("tasks", "show", "sums")
    assert result.out.splitlines()[:4] == ["sums:easy", "sums:same", "sums:broken", "sums:unsolvable"]
    assert "options: split (train or val), size, seed, most" in result.out


def test_tasks_show_prints_three_rows_the_tools_and_the_reward(suites: Command) -> None:
    result = suites("tasks", "show", "sums:easy?seed=3")
    assert [line for line in result.out.splitlines() if line.startswith("user: ")] == [
        "user: 3 + 1",
        "user: 4 + 1",
        "user: 5 + 1",
    ]
    assert '"environment": "sums"' in result.out
    assert result.out.splitlines()[-4:] == ["tools", "none", "reward", "reward: 1 for the sum"]


def test_check_tasks_plays_the_solution_and_an_empty_turn_for_every_row_of_a_name(suites: Command) -> None:
    result = suites("check", "tasks", "sums:easy?size=4&split=val", "--json")
    reports = json.loads(result.out)
    assert [(report["name"], report["nothing"], report["solution"]) for report in reports] == [
        (f"sums:easy row {number}", 0.0, 1.0) for number in (1, 2, 3, 4)
    ]
    for arguments, code, shown in (
        (["sums:unsolvable", "--limit", "2"], 1, "sums:unsolvable row 1: the solution scores 0 instead of 1"),
        (["sums:easy", "container.runtime=docker"], 2, "'sums:easy' has no workspace"),
        (["model", "--limit", "2"], 2, "--limit is for rows of a name"),
    ):
        result = suites("check", "tasks", *arguments, exit_code=code)
        assert shown in result.out + result.err


def test_rollout_and_eval_play_names(suites: Command) -> None:
    result = suites("rollout", "config.yaml", "--data", "sums:easy?size=2", "--out", "sums.jsonl")
    records = [json.loads(line) for line in Path("sums.jsonl").read_text().splitlines()]
    assert [record["row"]["total"] for record in records] == [1, 1, 2, 2]
    assert {record["row"]["data_source"] for record in records} == {"sums:easy"}
    assert {record["reward"] for record in records} == {0.0}
    result = suites("eval", "config.yaml", "--data", "sums:easy?size=2", "--data", "sums:same?size=1")
    assert all(name in result.out for name in ("sums:easy", "sums:same"))


NO_TOOLS = "{{ raise_exception('no tools, please') if messages[-1].role == 'tool' }}" + HERMES_TEMPLATE


TURNS = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
"""Template of turns with a given content."""


def verify(*arguments: object, columns: int = 140) -> Result:
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, ["verify-template", *map(str, arguments)], env=environment)


def write(path: Path, template: str) -> Path:
    path.write_text(template, encoding="utf-8")
    return path


def test_a_model_folder_is_reported_probe_by_probe(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    result = verify(tmp_path)
    assert result.exit_code == 0, result.output
    for shown in ("parallel tools", "exact", "without tools: exact", "with tools: exact"):
        assert shown in result.output


def test_a_template_file_can_be_verified_with_and_without_a_tokenizer(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path / "model")
    template_file = write(tmp_path / "own.jinja", NO_TOOLS)
    result = verify(template_file)
    assert (result.exit_code, "no tools, please" in result.output) == (1, True)
    assert verify(template_file, "--no-tools").exit_code == 0
    result = verify(tmp_path / "model", "--chat-template", template_file, "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert (report["without_tools"], report["with_tools"]) == ("exact", "unsupported")
    assert {"name", "verdict", "differences", "position"} <= set(report["probes"][0])
    empty = write(tmp_path / "empty.jinja", "{{ messages[0].content }}")
    assert json.loads(verify(empty, "--json").output)["verdict"] == "unsupported"


def test_a_difference_is_printed_with_both_texts(tmp_path: Path) -> None:
    result = verify(
        write(tmp_path / "a.jinja", TURNS % "{{ m.reasoning_content if loop.last }}{{ m.content }}"),
        "--no-tools",
    )
    assert result.exit_code == 0
    assert "without tools: differs (rewritten)" in result.output
    assert "thinking (and 1 more): kept 'I recall" in result.output
    assert "full render 'S" in result.output


def test_left_out_content_is_printed_first_and_sets_the_exit_code(tmp_path: Path) -> None:
    calls = "{{ m.content }}{{ m.tool_calls[0].function.arguments if m.tool_calls }}"
    path = write(tmp_path / "no_schemas.jinja", TURNS % calls)
    result = verify(path)
    assert result.exit_code == 3
    lines = [line.strip() for line in result.output.splitlines()]
    assert [line.partition(": ")[0] for line in (lines[0], lines[1], lines[3])] == [
        "left_out",
        "ignored_tools",
        "dropped_call",
    ]
    assert lines[2].endswith("'Gives the weather of a city.' is in no render")
    assert lines[4].endswith("'Oslo' is in no render")
    assert verify(path, "--no-tools").exit_code == 0
    assert [*json.loads(verify(path, "--json").output)["causes"]] == ["ignored_tools", "dropped_call"]
