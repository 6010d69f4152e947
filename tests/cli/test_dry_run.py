"""`--dry-run`: one line per check, before torch is imported, and nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.checks import before_start
from agent_loop.checks.before_start import (
    BUILT_IN_ESTIMATORS,
    BUILT_IN_LOSSES,
    BUILT_IN_SAMPLERS,
    COMPARING_ESTIMATORS,
)
from agent_loop.training import samplers
from agent_loop.training.advantages.estimate import estimator_needs
from agent_loop.training.losses import policy
from agent_loop.training.registry import ESTIMATORS, POLICY_LOSSES, SAMPLERS
from tests.cli.project import Command

assert policy  # (registers the losses)
assert samplers  # (registers the samplers)


def test_the_names_that_are_known_without_torch_are_those_of_the_package() -> None:
    for name in BUILT_IN_ESTIMATORS:
        assert estimator_needs(name).groups == (name in COMPARING_ESTIMATORS)
    for registry, names in (
        (ESTIMATORS, BUILT_IN_ESTIMATORS),
        (POLICY_LOSSES, BUILT_IN_LOSSES),
        (SAMPLERS, BUILT_IN_SAMPLERS),
    ):
        own = {
            name
            for name, function in registry._functions.items()
            if function.__module__.startswith("agent_loop.")
        }
        assert own == names


def test_every_check_has_a_line_and_nothing_is_started(command: Command) -> None:
    result = command("train", "config.yaml", "--dry-run")
    assert result.exit_code == 0, result.err + result.out
    lines = [line for line in result.out.splitlines() if line.startswith("ok")]
    names = [line.split(":")[0].split(maxsplit=1)[1] for line in lines]
    assert names == [
        "engine",
        "data.train_files",
        "reward",
        "agent loop",
        "algorithm",
        "model",
        "chat template",
        "run folder",
        "memory",
    ]
    assert "6 rows of rows.jsonl" in result.out
    assert not Path("run").exists()


def test_all_errors_are_printed_at_once(command: Command) -> None:
    arguments = ["algorithm.adv_estimator=gpro", "reward.function=task.py:rewrad", "model.path=modle"]
    result = command("train", "config.yaml", "--dry-run", *arguments)
    assert result.exit_code == 2
    errors = [line for line in result.out.splitlines() if line.startswith("ERROR")]
    assert [line.split(":")[0].split(maxsplit=1)[1] for line in errors] == [
        "reward",
        "algorithm",
        "model",
        "chat template",
    ]
    assert "4 errors; nothing was started" in result.out


@pytest.mark.parametrize("name", ["rollout", "eval"])
def test_rollouts_and_evaluations_are_checked_too(command: Command, name: str) -> None:
    result = command(name, "config.yaml", "--dry-run")
    assert result.exit_code == 0, result.err + result.out
    assert "everything is there" in result.out
    assert not Path("runs").exists()
    assert not Path("trajectories.parquet").exists()
    failed = command(name, "config.yaml", "--dry-run", "reward.function=task.py:rewrad")
    assert failed.exit_code == 2
    assert "did you mean 'reward'" in failed.out


def test_large_files_are_read_only_by_a_dry_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_start, "QUICK_BYTES", 10)
    Path("rows.jsonl").write_text('{"prompt": "x"}\n{"promp": "y"}\n', encoding="utf-8")
    result = command("train", "config.yaml", "--dry-run")
    assert "rows.jsonl" in result.out
    assert result.exit_code == 2


CHAT = '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n'


def test_supervised_training_is_checked_before_anything_is_loaded(command: Command) -> None:
    Path("chats.jsonl").write_text(CHAT, encoding="utf-8")
    result = command("sft", "config.yaml", "sft.files=[chats.jsonl]", "sft.where=reward>=1", "--dry-run")
    assert result.exit_code == 0, result.err + result.out
    for line in ("sft.files: 1 rows of chats.jsonl", "sft.where: reward>=1", "run folder: run, new"):
        assert line in result.out
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("sft.files=[]", "sft.files is empty"),
        ("sft.where=rewrd>=1", "did you mean 'reward'"),
        ("model.path=absent", "model.path is 'absent'"),
    ],
)
def test_a_mistake_in_supervised_training_is_named_before_it_starts(
    command: Command, override: str, complaint: str
) -> None:
    Path("chats.jsonl").write_text(CHAT, encoding="utf-8")
    result = command("sft", "config.yaml", "sft.files=[chats.jsonl]", override)
    assert result.exit_code == 2
    assert complaint in result.err
    assert not Path("run").exists()
