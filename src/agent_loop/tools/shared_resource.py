"""Resources shared by several trajectories: opened for the first user, closed after the last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

SharedT = TypeVar("SharedT")


class SharedResource(Generic[SharedT]):
    """Reference-counted resource, such as a connection, a session or a process. Each event loop has its own.

    Args:
        open_as: Opens the resource. After a failure, the next user tries again.
        close_as: Closes the resource.
    """

    def __init__(
        self, open_as: Callable[[], Awaitable[SharedT]], *, close_as: Callable[[SharedT], Awaitable[None]]
    ) -> None:
        self._open_as = open_as
        self._close_as = close_as
        self._states: WeakKeyDictionary[asyncio.AbstractEventLoop, _State[SharedT]] = WeakKeyDictionary()

    async def acquire(self, instance_id: str) -> SharedT:
        """Return the resource, and open it first if needed. Call `release` afterwards, even if this call raised."""
        state = self._state
        state.users.add(instance_id)
        async with state.lock:
            if not state.opened:
                state.opened.append(await self._open_as())
            return state.opened[0]

    async def release(self, instance_id: str) -> None:
        """Release the resource, and close it after its last user. A second release by the same user does nothing."""
        state = self._state
        state.users.discard(instance_id)
        async with state.lock:
            if not state.users and state.opened:
                await self._close_as(state.opened.pop())

    @property
    def num_users(self) -> int:
        """Number of current users on this event loop."""
        return len(self._state.users)

    @property
    def _state(self) -> _State[SharedT]:
        return self._states.setdefault(asyncio.get_running_loop(), _State())


@dataclass(slots=True)
class _State(Generic[SharedT]):
    users: set[str] = field(default_factory=set[str])
    opened: list[SharedT] = field(default_factory=list[SharedT])
    """At most one."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
