"""Users of the host for sandboxes, where the agent runs as root."""

from __future__ import annotations

import errno
import os
import random
import socket

FIRST_USER_ID = 30_000
NUM_USER_IDS = 20_000
"""Systems leave this range free."""


class HostUsers:
    """Gives out user ids, each to one sandbox at a time, of all agents on this machine."""

    def __init__(self) -> None:
        self._last = random.randrange(NUM_USER_IDS)  # other agents begin elsewhere

    def take(self) -> tuple[int, socket.socket]:
        """A user's id, and a socket whose name keeps it from others until it is closed everywhere.

        Raises:
            OSError: All are taken.
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
    """Becomes another user for good, keeping capabilities where the kernel lets them.

    Raises:
        OSError: This process may not, or its user namespace has no such user.
    """
    try:
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    except OSError as error:
        raise OSError(error.errno, f"cannot become user {user_id}: {error.strerror}") from error
