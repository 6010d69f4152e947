"""Removes the containers that killed processes left."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from agent_loop.runtime.owner import num_spared_orphans, parse_owner
from agent_loop.runtime.threads import run_in_thread
from agent_loop.workspaces.container.command_line import CommandLine
from agent_loop.workspaces.container.container import remove_containers

WAIT_S = 0.1
WAIT_ROUNDS = 300
"""How often starting containers are waited for, at most."""

_removed: set[CommandLine] = set()
"""Runtimes whose orphans this process has removed."""
_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def remove_orphans_once(command_line: CommandLine) -> None:
    """Remove the orphans of a runtime, unless this process has removed them before."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        if command_line not in _removed:
            await remove_orphaned_containers(command_line)
            _removed.add(command_line)


async def remove_orphaned_containers(command_line: CommandLine) -> list[str]:
    """Remove the containers whose owner is dead, and return their names.

    Containers that are being started are waited for. Containers of processes on other machines and in other
    containers are kept, since their owners may live.
    """
    for _ in range(WAIT_ROUNDS):
        if not await run_in_thread(num_spared_orphans):
            break
        await asyncio.sleep(WAIT_S)
    everything = ["--external"] if command_line.runtime == "podman" else []
    listed = await command_line.output("ps", "--all", *everything, "--format", "{{.Names}}")
    names = [name for name in listed.split() if (owner := parse_owner(name)) is not None and owner.is_dead]
    if names:
        await remove_containers(command_line, names)
    return names
