"""The processes of a team: those that `torchrun` started, or those that rank 0 starts itself, here or on a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Protocol

import torch
from torch.distributed import is_torchelastic_launched

from agent_loop.config import Config
from agent_loop.errors import ConfigError, TeamError
from agent_loop.runtime.concurrency import running_beside
from agent_loop.runtime.threads import run_in_thread
from agent_loop.training.local_followers import LocalFollowers
from agent_loop.training.policy import device_of
from agent_loop.training.team import ALONE, Team, join_team, leave_team, open_store

GRACE_S = 10.0
"""How long a process that may end has for it; and how long the end of one is waited for that others felt already."""


class Followers(AbstractContextManager[Any], Protocol):
    """All processes of a team but the first. On leaving they end, after `GRACE_S` by force."""

    host: str
    """Under which they reach this one."""

    def start(self, *, port: int) -> None:
        """Starts them; they find the team's store at the port."""
        ...

    async def until_one_ends(self) -> str:
        """Waits for that; tells which, and how."""
        ...


def is_follower() -> bool:
    """`torchrun` started this process, and another one leads."""
    return is_torchelastic_launched() and int(os.environ["RANK"]) > 0


@asynccontextmanager
async def lead_team(config: Config) -> AsyncGenerator[Team]:
    """The team that this process leads. At the end, the others end too.

    Raises:
        ConfigError: It cannot have so many processes.
        TeamError: Another process ended while this one went on.
    """
    size, device = config.trainer.num_processes, device_of(config.model)
    if is_torchelastic_launched():
        _check_size_of_torchrun(size)
        async with _leading(await run_in_thread(join_team, device)) as team:
            yield team
    elif size == 1:
        yield ALONE
    else:
        with _make_followers(config, device) as followers:
            store = open_store(size, host=followers.host)
            followers.start(port=store.port)
            meeting = {"store": store, "rank": 0, "world_size": size}
            async with (
                _watching(followers, size=size),
                _leading(await run_in_thread(join_team, device, **meeting)) as team,
            ):
                yield team


@asynccontextmanager
async def _leading(team: Team) -> AsyncGenerator[Team]:
    try:
        yield team
    finally:
        if not team.is_together:
            team.dismiss()
            leave_team()


@asynccontextmanager
async def _watching(followers: Followers, *, size: int) -> AsyncGenerator[None]:
    """Cancels its body when one of them ends."""
    scope, ends = asyncio.timeout(None), list[str]()

    async def watch() -> None:
        ends.append(await followers.until_one_ends())
        scope.reschedule(asyncio.get_running_loop().time())

    def described(end: str) -> TeamError:
        return TeamError(f"of the {size} processes that train together, {end}; see what it said, and resume")

    try:
        async with scope, running_beside(watch()):
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise described(ends[0]) from error
    except RuntimeError as error:  # of `torch.distributed`, in the middle of what all do
        try:
            async with asyncio.timeout(GRACE_S):
                end = await followers.until_one_ends()
        except TimeoutError:
            raise error from None
        raise described(end) from error


def _make_followers(config: Config, device: torch.device) -> Followers:
    if config.trainer.runtime == "ray":
        if device.type == "cuda" and not config.trainer.ray.num_gpus_per_learner:
            raise ConfigError(
                "trainer.ray.num_gpus_per_learner is 0 where training is on GPUs; set it to 1, or set model.device=cpu"
            )
        from agent_loop.training.ray_followers import RayFollowers  # late: others need no Ray

        return RayFollowers(config, grace_s=GRACE_S)
    _check_gpus(config.trainer.num_processes, device)
    return LocalFollowers(config, grace_s=GRACE_S)


def _check_size_of_torchrun(size: int) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if size not in (1, started):
        raise ConfigError(
            f"trainer.num_processes is {size}, but torchrun started {started}; leave it out, or torchrun"
        )


def _check_gpus(size: int, device: torch.device) -> None:
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.num_processes is {size}, but torch sees {torch.cuda.device_count()} GPUs; give each process "
            "one, or set model.device=cpu"
        )
