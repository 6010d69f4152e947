"""Side of verl on Ray: its unmodified `AgentLoopManager`, one `AgentLoopWorker`, client and balancer, as actors.

    python -m overhead.verl_on_ray FOLDER

Needs an interpreter with verl (`install_verl.sh`). Only the server is a stub: an actor with an async method, as in
verl's servers, that returns prepared objects without delay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
from omegaconf import open_dict
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from overhead import tools
from overhead.processes import tree_cpu_seconds
from overhead.rounds import Columns, Runner, serve
from overhead.shapes import Workload
from overhead.verl_side import LookupServer, batch_of, columns_of, make_config, make_tools

NUM_BATCHES = 4


class ServerActor:
    """Actor of a server with a workload's completions."""

    def __init__(self, folder: Path, scenario: str) -> None:
        self._server = LookupServer(Workload.read(folder, scenario))

    async def generate(self, **request: Any) -> TokenOutput:
        return self._server.generate(**request)


class Worker(AgentLoopWorker):
    """Worker of verl with the workload's tools."""

    def __init__(self, config: Any, llm_client: Any, *more: Any) -> None:
        super().__init__(config, llm_client, *more)
        folder = Path(config.actor_rollout_ref.model.path).parent
        workload = Workload.read(folder, config.trainer.experiment_name)
        tools.REPLIES.update(workload.replies)
        self.tools = make_tools(workload)


class VerlOnRayRunner(Runner):
    """Runner with verl's defaults except for lengths, tools and names, and with one worker."""

    def __init__(self, workload: Workload, *, folder: Path) -> None:
        self._workload = workload
        self._folder = folder
        self._manager: Any = None

    async def start(self) -> None:
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        scenario = self._workload.shape.name
        config = make_config(self._workload.shape, folder=self._folder)
        with open_dict(config):
            config.trainer.experiment_name = scenario
            config.actor_rollout_ref.rollout.agent.num_workers = 1
        server = ray.remote(ServerActor).remote(self._folder, scenario)
        balancer = get_router_handle({"lookup": server})
        self._manager = AgentLoopManager(config, LLMServerClient(config, load_balancer_handle=balancer))
        self._manager.agent_loop_workers_class = ray.remote(Worker)
        await self._manager._init_agent_loop_workers()

    async def run(self) -> Any:
        return await self._manager.generate_sequences(batch_of(self._workload))

    def columns(self, result: Any) -> Columns:
        return columns_of(result)

    async def close(self) -> None:
        ray.shutdown()


def main() -> None:
    folder = Path(sys.argv[1])
    serve(
        lambda workload: VerlOnRayRunner(workload, folder=folder),
        folder,
        cpu_seconds=tree_cpu_seconds,
        num_batches=NUM_BATCHES,
    )


if __name__ == "__main__":
    main()
