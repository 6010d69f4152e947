from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agent_loop.cli import app
from tests.helpers import HERMES_TEMPLATE, small_tokenizer

NO_TOOLS = "{{ raise_exception('no tools, please') if messages[-1].role == 'tool' }}" + HERMES_TEMPLATE


def verify(*arguments: object, columns: int = 140) -> Result:
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, ["verify-template", *map(str, arguments)], env=environment)


@pytest.fixture
def template_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(NO_TOOLS, encoding="utf-8")
    return path


def test_a_model_folder_is_reported_probe_by_probe(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    result = verify(tmp_path)
    assert result.exit_code == 0, result.output
    for shown in ("parallel tools", "exact", "without tools: exact", "with tools: exact"):
        assert shown in result.output


def test_a_template_file_can_be_verified_without_a_model(template_file: Path) -> None:
    result = verify(template_file)
    assert result.exit_code == 1
    assert "no tools, please" in result.output
    assert verify(template_file, "--no-tools").exit_code == 0


def test_a_difference_is_printed_with_both_texts(tmp_path: Path) -> None:
    path = tmp_path / "strips.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content if loop.last }}{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    result = verify(path, "--no-tools")
    assert result.exit_code == 0
    assert "without tools: differs (rewritten)" in result.output
    assert "thinking (and 1 more): kept 'I recall" in result.output
    assert "full render 'S" in result.output


def test_left_out_content_is_printed_first_and_sets_the_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "no_schemas.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ m.tool_calls[0].function.arguments if m.tool_calls }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    result = verify(path)
    assert result.exit_code == 3
    lines = [line.strip() for line in result.output.splitlines()]
    assert lines[0].startswith("left_out: ")
    assert lines[1].startswith("ignored_tools: ")
    assert lines[2].endswith("'Gives the weather of a city.' is in no render")
    assert lines[3].startswith("dropped_call: ")
    assert lines[4].endswith("'Oslo' is in no render")
    assert verify(path, "--no-tools").exit_code == 0
    assert [*json.loads(verify(path, "--json").output)["causes"]] == ["ignored_tools", "dropped_call"]


def test_a_template_file_can_be_verified_with_a_tokenizer(tmp_path: Path, template_file: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path / "model")
    result = verify(tmp_path / "model", "--chat-template", template_file, "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert (report["without_tools"], report["with_tools"]) == ("exact", "unsupported")
    assert {"name", "verdict", "differences", "position"} <= set(report["probes"][0])


def test_a_template_that_writes_nothing_is_unsupported(tmp_path: Path) -> None:
    path = tmp_path / "empty.jinja"
    path.write_text("{{ messages[0].content }}", encoding="utf-8")
    assert verify(path).exit_code == 1
    assert json.loads(verify(path, "--json").output)["verdict"] == "unsupported"


def test_help_has_examples() -> None:
    assert "agent-loop verify-template Qwen/Qwen3-4B" in verify("--help").output
