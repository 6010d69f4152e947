"""verl's own agent loop managers and `VerlAgentLoopManager`, behind the same verl configuration on one Ray cluster.

Needs an interpreter with verl (`install_verl.sh`) and this package. Client, balancer, rewards and TransferQueue are
verl's. Only the engine is a stub: an actor with an async method, as in verl's servers, that returns prepared objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import ray
import transfer_queue
from omegaconf import open_dict
from verl.experimental.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

from agent_loop.integrations.verl import VerlAgentLoopManager
from overhead.queue_batch import read_columns, wait_for_statuses
from overhead.rounds import BENCHMARKS, Columns
from overhead.shapes import Workload
from overhead.verl_on_ray import ServerActor
from overhead.verl_side import columns_of, make_config

PATHS = ("V0", "V1")
"""Data paths of verl's trainers: `DataProto`, and TransferQueue, which is the default."""
MANAGERS = {
    ("V0", "verl"): AgentLoopManager,
    ("V0", "ours"): VerlAgentLoopManager,
    ("V1", "verl"): AgentLoopManagerTQ,
    ("V1", "ours"): VerlAgentLoopManager,
}
TOOLS_FILE = """
from pathlib import Path

from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, FunctionTool

from overhead import tools
from overhead.shapes import Workload
from overhead.verl_side import make_tools

workload = Workload.read(Path({folder!r}), {scenario!r})
tools.REPLIES.update(workload.replies)
FUNCTION_TOOL_REGISTRY.update({{tool.name: tool for tool in make_tools(workload)}})
"""
"""Source of a file for `function_tool_path`."""


def start_cluster(*, num_cpus: int) -> None:
    """Start Ray and TransferQueue."""
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS.parent / 'src'}"}},
    )
    transfer_queue.init()


class ManagedWorkload:
    """A workload, with a server and all managers for it.

    Args:
        workload: The workload.
        folder: Folder of the workloads.
        num_workers: Number of workers of each manager.
    """

    def __init__(self, workload: Workload, *, folder: Path, num_workers: int = 1) -> None:
        self._workload = workload
        scenario = workload.shape.name
        config = make_config(workload.shape, folder=folder)
        tools_file = folder / f"verl_tools_{scenario.replace('-', '_')}.py"
        tools_file.write_text(TOOLS_FILE.format(folder=str(folder), scenario=scenario))
        with open_dict(config):
            config.actor_rollout_ref.rollout.agent.num_workers = num_workers
            if workload.shape.has_tools:
                config.actor_rollout_ref.rollout.multi_turn.function_tool_path = str(tools_file)
        server = ray.remote(ServerActor).remote(folder, scenario)
        client = LLMServerClient(config, load_balancer_handle=get_router_handle({"lookup": server}))
        self._managers: dict[tuple[str, str], Any] = {
            which: manager_class.create(config=config, llm_client=client)
            for which, manager_class in MANAGERS.items()
        }
        self._num_runs = 0

    def run(self, path: str, manager: str, *, num_copies: int = 1) -> Any:
        """Run a batch, and return it for `columns`."""
        prompts = [c.messages for c in self._workload.conversations] * num_copies
        if path == "V0":
            column = np.empty(len(prompts), dtype=object)
            column[:] = prompts
            batch = DataProto.from_dict(non_tensors={"raw_prompt": column})
            return self._managers[path, manager].generate_sequences(batch)
        return self._run_to_queue(self._managers[path, manager], prompts)

    def _run_to_queue(self, manager: Any, prompts: list[Any]) -> list[str]:
        """Submit a batch as verl's V1 trainer does, and wait for the statuses of its prompts."""
        self._num_runs += 1
        uids = [f"{self._workload.shape.name}-{self._num_runs}-{index:05}" for index in range(len(prompts))]
        rows = [
            {"raw_prompt": prompt, "uid": uid, "index": index}
            for index, (prompt, uid) in enumerate(zip(prompts, uids, strict=True))
        ]
        batch = tensordict_utils.list_of_dict_to_tensordict(rows)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", 1)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in uids]
        transfer_queue.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        manager.generate_sequences(batch)
        wait_for_statuses(uids)
        return uids

    def columns(self, path: str, result: Any) -> Columns:
        """Return the prompts, responses, masks and log-probs of a batch."""
        return columns_of(result) if path == "V0" else read_columns(result, shape=self._workload.shape)

    def close(self) -> None:
        """Remove what the batches left in the queue."""
        keys = list(transfer_queue.kv_list("train").get("train", {}))
        if keys:
            transfer_queue.kv_clear(keys=keys, partition_id="train")
