"""Trajectories of a verl run in a run folder, for the viewer and the commands of this package."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import transfer_queue
from omegaconf import OmegaConf, open_dict
from typer.testing import CliRunner

import tests.verl.user_code  # noqa: F401  (registers a loop)
from agent_loop.cli import app
from agent_loop.integrations.verl.manager.stored import BatchName, RunFolder
from agent_loop.integrations.verl.manager.worker import VerlRolloutWorker
from agent_loop.storage import StoredRun
from tests.verl.harness import RewardWorker, ScriptedClient, batch_of, run_ours, verl_config
from tests.verl.test_queue import rows_of, run

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240)]


def config_of(model: Path, run_dir: Path, **trainer: Any) -> Any:
    config = verl_config(model, n=2)
    with open_dict(config):
        config.agent_loop_config = {"trainer": {"run_dir": str(run_dir), **trainer}}
    return config


def reply(text: str) -> str:
    return f"I say {len(text) % 7}<|im_end|>"


def scored() -> dict[str, Any]:
    return {"reward_loop_worker_handles": [RewardWorker(lambda text: float(len(text)))]}


def stored(run_dir: Path) -> list[dict[str, Any]]:
    return [row for file in StoredRun(run_dir).files() for row in StoredRun(file.path).rows()]


def test_a_batch_is_stored_with_verls_scores_and_its_failures(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    batch = batch_of(["a", "break", "b"], agent_name=["single_turn_agent", "two_turns", "two_turns"])
    output = run_ours(config, ScriptedClient(reply), batch, **scored())

    rows = stored(tmp_path)
    scores = output.batch["rm_scores"].sum(dim=1).tolist()
    assert [row["group"] for row in rows] == [0, 1, 2]
    assert [row["reward"] for row in rows] == [scores[0], None, scores[2]]
    assert "this row breaks" in rows[1]["failure"]
    for row, ids, mask in zip(rows, output.batch["responses"], output.batch["response_mask"], strict=True):
        length = len(row["response_ids"])
        if not row["failure"]:
            assert list(row["response_ids"]) == ids[:length].tolist()
            assert list(row["response_mask"]) == mask[:length].tolist()
    assert {(row["split"], row["step"]) for row in rows} == {("train", 3)}

    shown = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "I say" in shown.output


def test_workers_of_a_batch_write_files_of_their_own_with_common_groups(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    folder = RunFolder(config)
    uids = ["x", "x", "y", "y"]
    places = folder.places(BatchName(3, validate=False), uids)
    for number, rows in enumerate((slice(0, 3), slice(3, 4))):

        async def work(number: int = number, rows: slice = rows) -> None:
            worker = VerlRolloutWorker(config, ScriptedClient(reply), number=number)
            batch = batch_of(["a", "a", "b", "b"], uid=uids)
            await worker.generate_batch(batch[rows], places=places[rows])

        asyncio.run(work())
    assert [row["trajectory_id"] for row in stored(tmp_path)] == [
        "group=0/rollout=0",
        "group=0/rollout=1",
        "group=1/rollout=0",
        "group=1/rollout=1",
    ]
    assert OmegaConf.load(tmp_path / "config.yaml").actor_rollout_ref.rollout.n == 2
    assert folder.places(BatchName(3, validate=False), ["z"]) == [(2, 0)]


def test_a_resumed_run_replaces_the_files_of_later_steps(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, keep_trajectories=2)

    async def steps(*steps: int) -> None:
        folder, worker = RunFolder(config), VerlRolloutWorker(config, ScriptedClient(reply))
        for step in steps:
            batch = batch_of(["a"])
            batch.meta_info["global_steps"] = step
            places = folder.places(BatchName(step, validate=False), ["u"])
            await worker.generate_batch(batch, places=places)

    asyncio.run(steps(1, 2, 3, 4))
    assert [file.step for file in StoredRun(tmp_path).files()] == [3, 4]
    asyncio.run(steps(4))
    assert [file.step for file in StoredRun(tmp_path).files()] == [3, 4]


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trajectories").write_text("a file")
    output = run_ours(config_of(model, tmp_path), ScriptedClient(reply), batch_of(["a"]))
    assert len(output) == 1
    assert "trajectories cannot be stored" in caplog.text


def test_the_sessions_of_the_queue_are_stored_before_the_batch_ends(model: Path, tmp_path: Path) -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    try:

        async def work() -> Any:
            worker = VerlRolloutWorker(config_of(model, tmp_path), ScriptedClient(reply), **scored())
            return await run(worker, rows_of("a", "b b"), partition="train")

        tags, _ = asyncio.run(work())
    finally:
        transfer_queue.close()
        ray.shutdown()
    assert {tags[uid]["status"] for uid in ("uid0", "uid1")} == {"finished"}
    rows = stored(tmp_path)
    assert [(row["group"], row["rollout"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row["reward"] > 0 and row["step"] == 7 and row["staleness"] == 3 for row in rows)
