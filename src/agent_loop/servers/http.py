"""HTTP client of engines. Every failure is raised as a `ServerError`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from agent_loop.errors import BadServerReply, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.describe import describe_error, one_line
from agent_loop.types import ServerStopReason

MAX_LINE_BYTES = 2**26
"""Largest size of one event in a stream. The log-probs of a long completion fit."""

KEEP_ALIVE_S = 2.0
"""Time for which idle connections are kept.

It is shorter than the servers' own limit (uvicorn: 5 s), so that no request uses a connection that is being closed.
"""


FINISH_REASONS: Mapping[str, ServerStopReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
"""Stop reasons by the names that engines give them. All others are failures."""


@contextmanager
def reading(reply: object, *, server: str, request_id: str = "") -> Generator[None]:
    """Raise `BadServerReply` if the body cannot read the fields of an engine's reply."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise BadServerReply(
            f"a reply cannot be read ({describe_error(error)}): {one_line(str(reply), max_length=200)}; check that the "
            "URL is that of the engine in rollout.engine",
            server=server,
            request_id=request_id,
        ) from error


class HttpStatusError(ServerError):
    """The engine returned an error status. The message ends with the body of the response."""

    def __init__(self, message: str, *, status: int, server: str, request_id: str) -> None:
        super().__init__(message, server=server, request_id=request_id)
        self.status = status


class HttpClient:
    """HTTP client of one engine."""

    def __init__(
        self,
        url: str,
        *,
        server: str,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
        socket_path: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._server = server
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._socket_path = socket_path
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._responses: set[aiohttp.ClientResponse] = set()
        """Responses that are being read."""

    async def get_json(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Return the JSON of a GET request. Errors are those of `post_json`."""
        return self._parsed(await self.get_text(path, timeout_s=timeout_s), path=path)

    async def get_text(self, path: str, *, timeout_s: float | None = None) -> str:
        """Return the text of a GET request. Errors are those of `post_json`."""
        async with self._response("GET", path, timeout_s=timeout_s) as response:
            return await response.text()

    async def post_json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Any:
        """Post JSON and return the JSON of the response, or None for an empty response."""
        request = self._response("POST", path, body=body or {}, request_id=request_id, timeout_s=timeout_s)
        async with request as response:
            text = await response.text()
        return self._parsed(text, path=path, request_id=request_id)

    async def stream_events(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Any]:
        """Post JSON and yield the JSON of each server-sent event, up to `[DONE]`.

        Leaving the iteration early closes the connection, which makes engines abort the request.
        """
        async with self._response(
            "POST", path, body=body, request_id=request_id, timeout_s=timeout_s, is_streamed=True
        ) as response:
            async for line in response.content:
                field, _, value = line.decode().strip().partition(":")
                if field != "data":
                    continue
                if value.strip() == "[DONE]":
                    return
                yield self._parsed(value, path=path, request_id=request_id)

    async def close(self) -> None:
        """Close the connections. Pending and later requests fail."""
        self._is_closed = True
        for response in self._responses:  # closing only the session would not wake their readers
            response.close()
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _response(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        request_id: str = "",
        timeout_s: float | None,
        is_streamed: bool = False,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request and yield its response. Errors, also those of reading it, are raised as `ServerError`."""
        if self._is_closed:
            raise ServerDied(
                "the client was closed; create a new one", server=self._server, request_id=request_id
            )
        if self._session is None:
            # No limit on connections: the engine queues requests, and a queue here would delay control calls.
            options: Any = {"limit": 0, "keepalive_timeout": KEEP_ALIVE_S}
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(**options)
                if self._socket_path is None
                else aiohttp.UnixConnector(self._socket_path, **options),
                headers=self._headers,
                read_bufsize=MAX_LINE_BYTES,
            )
        limit_s = timeout_s or self._timeout_s
        timeout = aiohttp.ClientTimeout(
            total=None if is_streamed else limit_s, sock_connect=limit_s, sock_read=limit_s
        )
        with self._typed_errors(path, request_id=request_id, timeout_s=limit_s):
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                self._responses.add(response)
                try:
                    if not response.ok:
                        text = one_line(await response.text(), max_length=500)
                        raise HttpStatusError(
                            f"{method} {path} returned {response.status} {response.reason}: {text}",
                            status=response.status,
                            server=self._server,
                            request_id=request_id,
                        )
                    yield response
                finally:
                    self._responses.discard(response)

    def _parsed(self, text: str, *, path: str, request_id: str = "") -> Any:
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadServerReply(
                f"{path} returned invalid JSON ({error}): {one_line(text, max_length=200)}",
                server=self._server,
                request_id=request_id,
            ) from error

    @contextmanager
    def _typed_errors(self, path: str, *, request_id: str, timeout_s: float) -> Generator[None]:
        def named(kind: type[ServerError], what: str) -> ServerError:
            return kind(what, server=self._server, request_id=request_id)

        try:
            yield
        except TimeoutError as error:
            what = f"no response from {self.url}{path} within {timeout_s:g} s"
            raise named(ServerTimeout, what) from error
        except (aiohttp.ClientError, OSError) as error:
            what = f"{self.url}{path} cannot be reached ({describe_error(error)}); check that the server is running"
            raise named(ServerDied, what) from error
        except RuntimeError as error:  # raised by aiohttp if the session was closed while the request began
            if not self._is_closed:
                raise
            raise named(ServerDied, f"the client was closed ({describe_error(error)})") from error
        except UnicodeDecodeError as error:
            raise named(BadServerReply, f"{path} returned bytes that are not UTF-8") from error
        except (ValueError, HttpProcessingError) as error:  # raised by aiohttp for a line that is too long
            what = f"{path} did not return an event stream ({describe_error(error)})"
            raise named(BadServerReply, what) from error
