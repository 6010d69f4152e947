"""`agent-loop config show` and `agent-loop doctor`: what a run and a machine have."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from agent_loop import __version__
from agent_loop.config import load_config
from tests.cli.project import Command


def settings_of(text: str) -> dict[str, str]:
    """Return the source of each printed setting."""
    return dict(map(str.strip, line.rsplit("#", 1)) for line in text.splitlines())  # pyright: ignore


def test_each_setting_is_printed_with_its_source(command: Command) -> None:
    result = command("config", "show", "config.yaml", "rollout.n=3", "trainer.total_steps=3")
    assert result.exit_code == 0, result.err
    sources = settings_of(result.out)
    assert sources["rollout.n=3"] == "command line"
    assert sources["trainer.total_steps=3"] == "config.yaml"
    assert sources["data.train_files=[rows.jsonl]"] == "config.yaml"
    assert "default" not in sources.values()


def test_the_printed_settings_are_accepted_on_the_command_line(command: Command) -> None:
    overrides = ["rollout.multi_turn.tools=[task.py:a, 'b c']", "data.prompt_key='yes'", "actor.lr=1e-5"]
    result = command("config", "show", "config.yaml", *overrides, "--all")
    printed = list(settings_of(result.out))
    assert load_config(overrides=printed) == load_config("config.yaml", overrides=overrides)


def test_doctor_names_versions_and_how_to_install_what_is_missing(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\necho {shlex.quote('0, NVIDIA H100, 81559 MiB, 550.1')}\n", encoding="utf-8"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    result = command("doctor", "--json")
    assert result.exit_code == 0, result.err
    found = {each["name"]: each for each in json.loads(result.out)}
    assert found["agent-loop"]["found"] == __version__
    assert found["GPU 0"]["found"] == "NVIDIA H100, 81559 MiB, 550.1"
    assert found["git"]["is_missing"]
    assert not found["torch"]["is_missing"]
    text = command("doctor").out
    assert "agent-loop check sandbox" in text
    for each in found.values():
        assert each["name"] in text
