"""The other processes of a team, as actors of the Ray cluster that this process has joined."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Self

from agent_loop.config import Config
from agent_loop.distributed.ray_module import answer_of, enter_folder, load_ray
from agent_loop.runtime.describe import describe_error
from agent_loop.training.follower import follow
from agent_loop.training.team import open_store


class RayFollowers:
    """Implements `Followers`, for `with`. Each goes to a node that has the CPUs and GPUs of `trainer.ray`."""

    def __init__(self, config: Config, *, grace_s: float) -> None:
        self._ray = load_ray()
        self.host: str = self._ray.util.get_node_ip_address()
        self._config = config
        self._grace_s = grace_s
        self._actors: list[Any] = []
        self._calls: list[Any] = []

    def start(self, *, port: int) -> None:
        ray_config = self._config.trainer.ray
        actor_class = self._ray.remote(
            num_cpus=ray_config.num_cpus_per_learner, num_gpus=ray_config.num_gpus_per_learner
        )(FollowerActor)
        ranks = range(1, self._config.trainer.num_processes)
        self._actors = [actor_class.remote() for _ in ranks]
        self._calls = [
            actor.follow.remote(self._config, host=self.host, port=port, rank=rank, folder=os.getcwd())
            for actor, rank in zip(self._actors, ranks, strict=True)
        ]

    async def until_one_ends(self) -> str:
        ends = {
            asyncio.ensure_future(_end_of(call, rank=rank)) for rank, call in enumerate(self._calls, start=1)
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._calls:
            self._ray.wait(self._calls, num_returns=len(self._calls), timeout=self._grace_s)
        for actor in self._actors:
            self._ray.kill(actor)


class FollowerActor:
    """Trains along with the driver. One call, in the main thread of its process."""

    def follow(self, config: Config, *, host: str, port: int, rank: int, folder: str) -> None:
        """Returns when the leader lets it go."""
        enter_folder(folder)
        size = config.trainer.num_processes
        store = open_store(size, host=host, port=port)
        follow(config, local_rank=0, store=store, rank=rank, world_size=size)


async def _end_of(call: Any, *, rank: int) -> str:
    try:
        await answer_of(call)
    except Exception as error:  # noqa: BLE001  (whatever it is, the process has ended of it)
        return f"process {rank} ended: {describe_error(error)}"
    return f"process {rank} ended"
