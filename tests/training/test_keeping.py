"""A run stores its trajectories with their advantages and log-probs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agent_loop.config import Config
from agent_loop.storage import StoredRun
from agent_loop.training import metrics as names
from tests.training.fakes import FakeRollouts, tiny_policy
from tests.training.test_ppo_trainer import changed, train


def test_each_step_is_kept_with_advantages_and_the_trainers_logprobs(config: Config) -> None:
    config = changed(config, "trainer", total_steps=2, val_every=1)
    config = changed(config, "actor", ppo_mini_batches=1)
    result = train(config)
    run = StoredRun(result.run_dir)
    assert [(f.step, f.split, f.num_trajectories) for f in run.files()] == [
        (1, "train", 16),
        (1, "val", 6),
        (2, "train", 16),
        (2, "val", 6),
    ]
    rows = list(run.rows(split="train", step=2))
    trained = [row for row in rows if row["advantages"] is not None]
    assert trained
    for row in trained:
        is_model = row["response_mask"] == 1
        assert np.abs(row["train_logprobs"] - row["response_logprobs"])[is_model].max() < 1e-5
        assert row["logprob_diff_max"] < 1e-5
        assert row["advantage"] == pytest.approx(row["advantages"][is_model].mean())
    by_group: dict[int, list[float]] = {}
    for row in trained:
        by_group.setdefault(row["group"], []).append(row["advantage"])
    assert all(abs(sum(each)) < 1e-4 for each in by_group.values())
    assert {(row["weight_version"], row["staleness"]) for row in rows} == {(1, 0)}
    assert all(row["advantages"] is None for row in run.rows(split="val"))
    means = {line["step"]: line.get(names.REWARD_MEAN) for line in run.metrics()}
    assert means[2] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert run.vocabulary()[7] == "7"


def test_a_resumed_run_rewrites_the_files_after_the_checkpoint(config: Config) -> None:
    config = changed(config, "trainer", total_steps=3, save_every=2)
    result = train(changed(config, "trainer", save_every=2))
    folder = result.run_dir / "trajectories"
    later = result.run_dir / "checkpoints" / "step-000003"
    later.rename(result.run_dir / "gone")
    (folder / "train-000009.parquet").write_bytes(b"of a later step")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}

    train(config, rollouts=FakeRollouts(tiny_policy()), resume=True)

    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(after) == [f"train-{step:06d}.parquet" for step in (1, 2, 3)]
    assert [after[name] != before[name] for name in sorted(after)] == [False, False, True]


def test_a_failed_write_is_counted_in_a_metric_and_the_run_continues(config: Config) -> None:
    run_dir = Path(config.trainer.run_dir)
    run_dir.mkdir()
    (run_dir / "trajectories").write_text("in the way", encoding="utf-8")
    result = train(changed(config, "trainer", total_steps=3, save_every=None))
    assert result.step == 3
    lines = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1][names.UNSTORED_FILES] >= 1
