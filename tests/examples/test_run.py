from __future__ import annotations

import pytest

from examples.run import EXIT_ERROR, RECIPES, main


def test_help_lists_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)


def test_an_unknown_example_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no_such_example"])
    assert ended.value.code == EXIT_ERROR
    assert "no_such_example" in capsys.readouterr().err


def test_settings_may_follow_options(monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, object] = {}

    async def run_example(task: str, **options: object) -> int:
        received.update(options, task=task)
        return 0

    monkeypatch.setattr("examples.run.run_example", run_example)
    assert main(["two_hop_lookup", "--seed", "3", "rollout.deterministic=true", "--steps", "2"]) == 0
    assert received["task"] == "two_hop_lookup"
    assert received["seed"] == 3
    assert received["settings"] == ["rollout.deterministic=true", "trainer.total_steps=2"]
