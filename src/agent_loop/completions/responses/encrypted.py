"""Opaque tokens that carry reasoning through clients which store nothing on the server.

OpenAI encrypts reasoning, because its clients may not read it. Here, the client is the program under training. The
token is an encoding, not a cipher.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "agent-loop-reasoning-1:"


def write_encrypted(reasoning: str) -> str:
    """Return the token that holds a reasoning text."""
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def read_encrypted(token: str) -> str | None:
    """Return the reasoning text of a token; None if another server wrote the token."""
    if not token.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(token.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
