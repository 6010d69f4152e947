"""Entries of both workers in TransferQueue, the data path of verl's V1 trainer, and trajectories in a run folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from typer.testing import CliRunner
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils

import tests.verl.user_code  # noqa: F401  (registers a loop)
from agent_loop.cli import app
from agent_loop.integrations.verl.manager.stored import BatchName, RunFolder
from agent_loop.integrations.verl.manager.worker import VerlRolloutWorker
from agent_loop.storage import StoredRun
from tests.verl.harness import ScriptedClient, batch_of, run_ours, saying_a_number, scored, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    yield
    transfer_queue.close()
    ray.shutdown()


def rows_of(*prompts: str, validate: bool = False, **columns: list[Any]) -> TensorDict:
    """Return a batch as verl's V1 trainer sends it."""
    rows = [
        {
            "raw_prompt": [{"role": "user", "content": prompt}],
            "uid": f"uid{index}",
            "index": index,
            "data_source": "x",
            **{name: values[index] for name, values in columns.items()},
        }
        for index, prompt in enumerate(prompts)
    ]
    batch = tensordict_utils.list_of_dict_to_tensordict(rows)
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 7)
    if validate:
        tensordict_utils.assign_non_tensor_data(batch, "validate", True)
    return batch


async def run(worker: Any, batch: TensorDict, *, partition: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a batch to its end, and return the tags and the fields of all entries. The queue is empty afterwards."""
    start = worker.start_batch if isinstance(worker, VerlRolloutWorker) else worker.generate_sequences
    tasks = worker._running if isinstance(worker, VerlRolloutWorker) else worker.background_tasks
    await start(batch)
    while tasks:
        await asyncio.gather(*tasks)
    tags = (await transfer_queue.async_kv_list(partition))[partition]
    keys = [key for key, tag in tags.items() if tag["status"] == "success"]
    data = await transfer_queue.async_kv_batch_get(keys=keys, partition_id=partition)
    fields = {key: {name: values[index] for name, values in data.items()} for index, key in enumerate(keys)}
    await transfer_queue.async_kv_clear(keys=list(tags), partition_id=partition)
    return tags, fields


def run_both(model: Path, *prompts: str, partition: str = "train", **columns: Any) -> Any:
    """Run both workers, assert that their tags and fields are the same, and return those of this package."""
    config = verl_config(model, n=2, val_kwargs__n=3)
    is_val = partition == "val"

    async def both() -> Any:
        found = []
        for worker_class in (AgentLoopWorkerTQ.__ray_metadata__.modified_class, VerlRolloutWorker):
            client = ScriptedClient(saying_a_number)
            worker = worker_class(config, client, **scored(lambda text: float(len(text))))
            batch = rows_of(*prompts, validate=is_val, **columns)
            found.append(await run(worker, batch, partition=partition))
        return found

    (verls_tags, verls_fields), (tags, fields) = asyncio.run(both())
    assert tags == verls_tags
    assert set(fields) == set(verls_fields)
    for key, columns_of_verl in verls_fields.items():
        assert set(fields[key]) >= set(columns_of_verl) - {"mm_processor_kwargs", "mm_processor_output"}
        for name, value in columns_of_verl.items():
            if isinstance(value, torch.Tensor):
                assert fields[key][name].dtype == value.dtype, name
                assert torch.equal(fields[key][name], value), name
            elif name in fields[key] and name != "metrics":
                assert repr(fields[key][name]) == repr(value), name
    return tags, fields


@pytest.mark.usefixtures("queue")
def test_the_sessions_of_each_prompt_are_in_the_queue_in_their_partition(model: Path) -> None:
    tags, fields = run_both(model, "a", "b b")
    assert {tags[uid]["status"] for uid in ("uid0", "uid1")} == {"finished"}
    assert set(fields) == {"uid0_0_0", "uid0_1_0", "uid1_0_0", "uid1_1_0"}
    assert tags["uid0_0_0"]["global_steps"] == 7
    assert tags["uid0_0_0"]["min_global_steps"] == 3
    _, fields = run_both(model, "a", partition="val")
    assert len(fields) == 3


@pytest.mark.usefixtures("queue")
def test_a_row_determines_its_number_of_sessions_and_a_group_with_a_failure_fails(model: Path) -> None:
    tags, fields = run_both(
        model,
        "a",
        "break",
        "b",
        agent_name=["two_turns", "two_turns", "single_turn_agent"],
        __rollout_n__=[1, 2, 3],
        __do_sample__=[True, True, False],
    )
    statuses = [tags[uid]["status"] for uid in ("uid0", "uid1", "uid2")]
    assert statuses == ["finished", "failure", "finished"]
    assert sorted(key.split("_")[0] for key in fields) == ["uid0", "uid2", "uid2", "uid2"]


def config_of(model: Path, run_dir: Path, **trainer: Any) -> Any:
    config = verl_config(model, n=2)
    with open_dict(config):
        config.agent_loop_config = {"trainer": {"run_dir": str(run_dir), **trainer}}
    return config


def stored(run_dir: Path) -> list[dict[str, Any]]:
    return [row for file in StoredRun(run_dir).files() for row in StoredRun(file.path).rows()]


def test_a_batch_is_stored_with_verls_scores_and_its_failures(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path)
    batch = batch_of(["a", "break", "b"], agent_name=["single_turn_agent", "two_turns", "two_turns"])
    output = run_ours(config, ScriptedClient(saying_a_number), batch, **scored(lambda text: float(len(text))))

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


async def test_workers_of_a_batch_write_files_of_their_own_with_common_groups(
    model: Path, tmp_path: Path
) -> None:
    config = config_of(model, tmp_path)
    folder = RunFolder(config)
    uids = ["x", "x", "y", "y"]
    places = folder.places(BatchName(3, validate=False), uids)
    for number, rows in enumerate((slice(0, 3), slice(3, 4))):
        worker = VerlRolloutWorker(config, ScriptedClient(saying_a_number), number=number)
        batch = batch_of(["a", "a", "b", "b"], uid=uids)
        await worker.generate_batch(batch[rows], places=places[rows])
    assert [(row["group"], row["rollout"]) for row in stored(tmp_path)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert OmegaConf.load(tmp_path / "config.yaml").actor_rollout_ref.rollout.n == 2
    assert folder.places(BatchName(3, validate=False), ["z"]) == [(2, 0)]


def test_a_resumed_run_replaces_the_files_of_later_steps(model: Path, tmp_path: Path) -> None:
    config = config_of(model, tmp_path, keep_trajectories=2)

    async def steps(*steps: int) -> None:
        folder, worker = RunFolder(config), VerlRolloutWorker(config, ScriptedClient(saying_a_number))
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
    output = run_ours(config_of(model, tmp_path), ScriptedClient(saying_a_number), batch_of(["a"]))
    assert len(output) == 1
    assert "trajectories cannot be stored" in caplog.text


@pytest.mark.usefixtures("queue")
async def test_the_sessions_of_the_queue_are_stored_before_the_batch_ends(
    model: Path, tmp_path: Path
) -> None:
    scores = scored(lambda text: float(len(text)))
    worker = VerlRolloutWorker(config_of(model, tmp_path), ScriptedClient(saying_a_number), **scores)
    tags, _ = await run(worker, rows_of("a", "b b"), partition="train")
    assert {tags[uid]["status"] for uid in ("uid0", "uid1")} == {"finished"}
    rows = stored(tmp_path)
    assert [(row["group"], row["rollout"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row["reward"] > 0 and row["step"] == 7 and row["staleness"] == 3 for row in rows)
