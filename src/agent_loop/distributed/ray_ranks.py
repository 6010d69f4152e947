"""The training ranks other than 0, as actors of the Ray cluster that this process has joined."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Protocol, Self

from agent_loop.config import Config
from agent_loop.distributed.device_group import first_learner_bundle, gpus_per_learner, strategy_for
from agent_loop.distributed.ray_module import await_result, enter_folder, load_ray
from agent_loop.runtime.describe import describe_error


class RunRank(Protocol):
    """Function that connects to rank 0 and runs its commands until rank 0 stops it."""

    def __call__(self, config: Config, *, host: str, port: int, rank: int, local_rank: int) -> None: ...


class RayRanks:
    """The ranks other than 0, as actors of Ray. A context manager.

    Ray places each rank on a node that has the CPUs and GPUs of `trainer.ray`.
    """

    def __init__(self, config: Config, *, run_rank: RunRank, grace_s: float) -> None:
        self._ray = load_ray()
        self.host: str = self._ray.util.get_node_ip_address()
        self._config = config
        self._run_rank = run_rank
        self._grace_s = grace_s
        self._actors: list[Any] = []
        self._calls: list[Any] = []

    def start(self, *, port: int) -> None:
        ray_config = self._config.trainer.ray
        has_gpus = self._ray.cluster_resources().get("GPU", 0.0) > 0
        actor_class = self._ray.remote(
            num_cpus=ray_config.num_cpus_per_learner,
            num_gpus=gpus_per_learner(self._config, has_gpus=has_gpus),
        )(RankActor)
        ranks = range(1, self._config.trainer.num_processes)
        self._actors = [actor_class.options(**self._place(rank)).remote() for rank in ranks]
        self._calls = [
            actor.run.remote(
                self._run_rank, self._config, host=self.host, port=port, rank=rank, folder=os.getcwd()
            )
            for actor, rank in zip(self._actors, ranks, strict=True)
        ]

    def _place(self, rank: int) -> dict[str, Any]:
        """Return the options that place a rank in its bundle, if the run has a placement."""
        if not self._config.placement.is_set:
            return {}
        bundle = first_learner_bundle(self._config) + rank
        return {"scheduling_strategy": strategy_for(self._ray, bundle=bundle)}

    async def wait_for_exit(self) -> str:
        exits = {
            asyncio.ensure_future(_wait_for_exit(call, rank=rank))
            for rank, call in enumerate(self._calls, start=1)
        }
        try:
            done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for each in exits:
                each.cancel()
            await asyncio.wait(exits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._calls:
            self._ray.wait(self._calls, num_returns=len(self._calls), timeout=self._grace_s)
        for actor in self._actors:
            self._ray.kill(actor)


class RankActor:
    """Process of one rank. Its one call runs in the main thread of the process."""

    def run(self, run_rank: RunRank, config: Config, *, host: str, port: int, rank: int, folder: str) -> None:
        enter_folder(folder)
        run_rank(config, host=host, port=port, rank=rank, local_rank=0)  # Ray shows each actor its own GPUs


async def _wait_for_exit(call: Any, *, rank: int) -> str:
    try:
        await await_result(call)
    except Exception as error:  # noqa: BLE001  (any error ends the process)
        return f"process {rank} ended: {describe_error(error)}"
    return f"process {rank} ended"
