"""Unique identifiers."""

from __future__ import annotations

import os
import random

_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """Return 32 random hexadecimal digits, which are not suitable as a secret.

    Unlike `uuid4`, this makes no system call.
    """
    return f"{_random.getrandbits(128):032x}"
