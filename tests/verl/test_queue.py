"""Entries of this package and of verl's own worker in TransferQueue, the data path of verl's V1 trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import torch
import transfer_queue
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils

import tests.verl.user_code  # noqa: F401  (registers a loop)
from agent_loop.integrations.verl.manager.worker import VerlRolloutWorker
from tests.cli.project import save_model
from tests.verl.harness import RewardWorker, ScriptedClient, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    yield save_model(tmp_path_factory.mktemp("verl"))
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
            client = ScriptedClient(lambda text: f"I say {len(text) % 7}<|im_end|>")
            handles = [RewardWorker(lambda text: float(len(text)))]
            worker = worker_class(config, client, reward_loop_worker_handles=handles)
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


def test_the_sessions_of_each_prompt_are_in_the_queue(model: Path) -> None:
    tags, fields = run_both(model, "a", "b b")
    assert {tags[uid]["status"] for uid in ("uid0", "uid1")} == {"finished"}
    assert set(fields) == {"uid0_0_0", "uid0_1_0", "uid1_0_0", "uid1_1_0"}
    assert tags["uid0_0_0"]["global_steps"] == 7
    assert tags["uid0_0_0"]["min_global_steps"] == 3


def test_validation_goes_to_its_partition_with_its_number_of_sessions(model: Path) -> None:
    _, fields = run_both(model, "a", partition="val")
    assert len(fields) == 3


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
