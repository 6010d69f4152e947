"""Host users for sandboxes, if the agent runs as root."""

from __future__ import annotations

import errno
import os
import random
import socket

FIRST_USER_ID = 30_000
NUM_USER_IDS = 20_000
"""Size of the range of user ids, which systems usually leave free."""


class HostUsers:
    """Allocator of user ids. Each id belongs to one sandbox at a time, across all agents on this machine."""

    def __init__(self) -> None:
        self._last = random.randrange(NUM_USER_IDS)  # other agents start at other ids

    def acquire(self) -> tuple[int, socket.socket]:
        """Return a user id, and a socket whose name reserves the id until the socket is closed everywhere.

        Raises:
            OSError: All ids are in use.
        """
        for _ in range(NUM_USER_IDS):
            self._last = (self._last + 1) % NUM_USER_IDS
            user_id = FIRST_USER_ID + self._last
            holder = socket.socket(socket.AF_UNIX)
            try:
                holder.bind(f"\0agent-loop-sandbox-user-{user_id}")
            except OSError as error:
                holder.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return user_id, holder
        raise OSError(errno.EUSERS, os.strerror(errno.EUSERS))


def change_user(user_id: int) -> None:
    """Permanently change the user of this process. Capabilities are kept if the kernel permits.

    Raises:
        OSError: The process may not change its user, or its user namespace has no such user.
    """
    try:
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    except OSError as error:
        raise OSError(error.errno, f"cannot become user {user_id}: {error.strerror}") from error
