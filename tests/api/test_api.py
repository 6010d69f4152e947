"""Rollouts, evaluations and trainings from Python, with and without a running event loop."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from agent_loop.api import Trainer, evaluate_sync, load_config, load_rows, rollout, rollout_sync
from agent_loop.api.runs import run_sync
from agent_loop.errors import ConfigError, DataError
from tests.cli.project import make_project

ROWS = [{"prompt": "one"}, {"prompt": [{"role": "user", "content": "two"}]}]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a project with a tiny model, and return its configuration."""
    path = make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return path


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_a_rollout_of_rows_in_memory_is_scored_and_shown_as_html(project: Path) -> None:
    found = rollout_sync(project, ROWS, n=2, console=quiet())
    assert [(t.group, t.rollout) for t in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.mean_reward == sum(t.reward or 0.0 for t in found) / 4
    page = found._repr_html_()
    assert page.count("<details>") == 4
    assert all(f"{t.trajectory_id} · reward {t.reward:g}" in page for t in found)
    assert page.count("log-prob -") == sum(len(t.output.response_ids) for t in found)
    assert len(found[:2]) == 2
    assert repr(found) == f"Rollout of 4 trajectories, mean reward {found.mean_reward}"
    one = found.show(3)._repr_html_()
    assert repr(found.show(3)).startswith(f"{found[3].trajectory_id} · reward")
    assert f"{found[3].trajectory_id} · reward {found[3].reward:g}" in one
    assert one.count("log-prob -") == len(found[3].output.response_ids)
    rows = [{"prompt": "<script>alert(1)</script>"}]
    page = rollout_sync(project, rows, n=1, console=quiet())._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_rows_default_to_the_files_of_the_configuration(project: Path) -> None:
    assert len(rollout_sync(load_config(project), console=quiet())) == 12
    evaluation = evaluate_sync(str(project), console=quiet())
    assert len(evaluation.rows) == 6
    rows = load_rows("rows.jsonl")
    assert evaluate_sync(project, rows[:2], n=3, console=quiet()).rows[1].num_scored == 3
    settings: dict[str, Any] = yaml.safe_load(project.read_text(encoding="utf-8"))
    settings["rollout"]["n"] = 1
    assert len(rollout_sync(settings, "rows.jsonl", console=quiet())) == 6


async def test_the_sync_twins_work_while_an_event_loop_is_running(project: Path) -> None:
    assert len(rollout_sync(project, ROWS, n=1, console=quiet())) == 2
    assert len(await rollout(project, ROWS, n=1, console=quiet())) == 2


def test_a_trainer_trains_and_resumes(project: Path) -> None:
    result = Trainer(load_config(project, overrides=["trainer.total_steps=1"]), console=quiet()).fit_sync()
    assert result.step == 1
    resumed = Trainer(project, resume=True, console=quiet()).fit_sync()
    assert resumed.step == 3
    lines = (resumed.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_mistakes_are_named_before_anything_starts(project: Path) -> None:
    with pytest.raises(DataError, match="has no 'prompt'"):
        rollout_sync(project, [{"question": "one"}], console=quiet())
    with pytest.raises(ConfigError, match=r"rollout\.nn"):
        rollout_sync({"rollout": {"nn": 2}}, ROWS, console=quiet())
    with pytest.raises(ConfigError, match=r"data\.val_files is empty and no rows are given"):
        evaluate_sync({"model": {"path": "model"}}, console=quiet())


async def test_an_error_in_the_other_thread_is_raised_in_the_caller() -> None:
    async def fail() -> None:
        raise LookupError("nothing here")

    with pytest.raises(LookupError, match="nothing here"):
        run_sync(fail)


async def test_ctrl_c_cancels_the_coroutine_and_waits_for_its_cleanup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, ended = threading.Event(), list[str]()

    class Interrupted(threading.Thread):
        """Thread whose first `join` is interrupted by Ctrl-C, after its work has begun."""

        is_first = True

        def join(self, timeout: float | None = None) -> None:
            if self.is_first:
                self.is_first = False
                began.wait()
                raise KeyboardInterrupt
            super().join(timeout)

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned up")

    monkeypatch.setattr("agent_loop.api.runs.Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sync(work)
    assert ended == ["cleaned up"]
