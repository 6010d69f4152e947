"""Sessions of OpenEnv servers: the messages of their WebSocket protocol, and the choice of a server."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from agent_loop.errors import EnvironmentUnavailable
from agent_loop.runtime.describe import describe_error

UNAVAILABLE = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"})
"""Codes of errors that do not depend on the action."""
AVOIDED_S = 5.0
"""Seconds for which other servers are preferred to one that failed."""
HEARTBEAT_S = 30.0
"""Seconds between checks of an idle connection."""
CONNECT_S = 10.0
"""Seconds that a server has to accept a connection."""
CLOSE_S = 2.0
"""Seconds that a server has to close a session."""
MAX_MESSAGE_BYTES = 2**27

_open_sessions: Counter[str] = Counter()
_failed_at: dict[str, float] = {}


class InvalidAction(Exception):
    """An action was refused, which the model is told."""


class OpenEnvSession:
    """WebSocket connection to a server, which keeps one environment for it.

    Args:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._is_waiting = False

    async def open(self) -> dict[str, Any]:
        """Connect, and return the server's schemas.

        Raises:
            EnvironmentUnavailable: The server cannot be reached.
        """
        _open_sessions[self.url] += 1
        self._http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(CONNECT_S):
                async with self._http.get(f"{self.url}/schema", raise_for_status=True) as response:
                    schemas: dict[str, Any] = await response.json()
                self._socket = await self._http.ws_connect(
                    f"{self.url}/ws", heartbeat=HEARTBEAT_S, max_msg_size=MAX_MESSAGE_BYTES
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._unavailable(f"cannot be reached: {describe_error(error)}") from error
        return schemas

    async def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of its answer.

        Raises:
            EnvironmentUnavailable: The connection ended, or the server refuses the session.
            InvalidAction: The server refuses the action.
            RuntimeError: The environment raised an exception.
        """
        assert self._socket is not None
        if self._is_waiting:
            raise self._unavailable("did not answer an earlier request in time")
        self._is_waiting = True
        with suppress(ConnectionError):  # the reason may have arrived already, and is read next
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._unavailable(f"closed the connection ({message.type.name})")
        self._is_waiting = False
        answer = message.json()
        if answer["type"] == "error":
            raise self._error(answer["data"])
        _failed_at.pop(self.url, None)
        return answer["data"]

    async def close(self) -> None:
        """End the session."""
        _open_sessions[self.url] -= 1
        if self._socket is not None and not self._socket.closed:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._socket.send_json({"type": "close"})
                    await self._socket.close()
        if self._http is not None:
            await self._http.close()

    def _error(self, data: Mapping[str, Any]) -> Exception:
        code, text = data.get("code"), str(data.get("message"))
        if code in UNAVAILABLE:
            return self._unavailable(f"refuses the session: {text} ({code})")
        if code == "VALIDATION_ERROR":
            faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in data.get("errors", ())]
            return InvalidAction("; ".join(faults) or text)
        return RuntimeError(f"the environment of {self.url} failed: {text} ({code})")

    def _unavailable(self, problem: str) -> EnvironmentUnavailable:
        _failed_at[self.url] = time.monotonic()
        return EnvironmentUnavailable(f"the OpenEnv server {self.url} {problem}")


def by_preference(urls: Sequence[str]) -> list[str]:
    """Return servers in the order in which a session tries them: by recent failures, then by their open sessions."""
    now = time.monotonic()
    return sorted(
        urls, key=lambda url: (now - _failed_at.get(url, -math.inf) < AVOIDED_S, _open_sessions[url])
    )
