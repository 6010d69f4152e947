"""Talks to an engine over HTTP; whatever goes wrong comes out as a typed `ServerError`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from agent_loop.errors import BadServerReply, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.describe import describe_error, one_line

MAX_LINE_BYTES = 2**26
"""Of one event in a stream: a long completion's log-probs fit easily."""

KEEP_ALIVE_S = 2.0
"""Shorter than servers keep idle connections (uvicorn: 5 s), so that no request meets one that is just closing."""


class HttpStatusError(ServerError):
    """The engine answered with a status that is no success; the message ends with what it said."""

    def __init__(self, message: str, *, status: int, server: str, request_id: str) -> None:
        super().__init__(message, server=server, request_id=request_id)
        self.status = status


class HttpClient:
    """One engine's address.

    Args:
        url: As in `http://host:8000`; a path at its end is kept.
        server: Names the server in errors.
        timeout_s: How long an answer, or the next part of a stream, may take.
        headers: Sent with every request, such as an API key.
    """

    def __init__(
        self, url: str, *, server: str, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._server = server
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._answers: set[aiohttp.ClientResponse] = set()
        """Those that are being read."""

    async def get_json(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Raises: ServerError: As `post_json`."""
        return await self._json("GET", path, body=None, request_id="", timeout_s=timeout_s)

    async def get_text(self, path: str, *, timeout_s: float | None = None) -> str:
        """Raises: ServerError: As `post_json`."""
        return await self._text("GET", path, body=None, request_id="", timeout_s=timeout_s)

    async def post_json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> Any:
        """Posts JSON and reads the JSON that comes back; None for an empty answer.

        Raises:
            HttpStatusError: The engine answered with an error.
            ServerDied: It cannot be reached, or the connection broke.
            ServerTimeout: It took longer than `timeout_s`.
            BadServerReply: It answered something else than JSON.
        """
        return await self._json("POST", path, body=body or {}, request_id=request_id, timeout_s=timeout_s)

    async def stream_events(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Any]:
        """Posts JSON and yields the JSON of each server-sent event, up to `[DONE]`.

        Leaving the iteration early closes the connection, by which engines notice that the request is over.

        Raises:
            ServerError: As `post_json`; the time limit holds from one event to the next.
        """
        limit_s = timeout_s or self._timeout_s
        limits = aiohttp.ClientTimeout(total=None, sock_connect=limit_s, sock_read=limit_s)
        self._refuse_if_closed(request_id)
        with self._typed_errors(path, request_id=request_id, timeout_s=limit_s):
            async with self._request("POST", path, body=body, request_id=request_id, limits=limits) as answer:
                async for line in answer.content:
                    field, _, value = line.decode().strip().partition(":")
                    if field != "data":
                        continue
                    if value.strip() == "[DONE]":
                        return
                    yield self._parsed(value, path=path, request_id=request_id)

    @contextmanager
    def validating(self, path: str) -> Generator[None]:
        """Read fields of an answer in the body.

        Raises:
            BadServerReply: The answer lacks a field, or has one of another type.
        """
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise BadServerReply(
                f"{path} was answered with JSON of another form ({describe_error(error)}); see that the URL is that of "
                "an engine which rollout.engine names",
                server=self._server,
            ) from error

    async def close(self) -> None:
        """Closes the connections. What still waits fails, and so does what is asked later."""
        self._is_closed = True
        for answer in self._answers:  # closing the session alone would leave their readers waiting
            answer.close()
        if self._session is not None:
            await self._session.close()

    async def _json(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None,
        request_id: str,
        timeout_s: float | None,
    ) -> Any:
        text = await self._text(method, path, body=body, request_id=request_id, timeout_s=timeout_s)
        return self._parsed(text, path=path, request_id=request_id) if text.strip() else None

    async def _text(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None,
        request_id: str,
        timeout_s: float | None,
    ) -> str:
        limit_s = timeout_s or self._timeout_s
        limits = aiohttp.ClientTimeout(total=limit_s)
        self._refuse_if_closed(request_id)
        with self._typed_errors(path, request_id=request_id, timeout_s=limit_s):
            async with self._request(method, path, body=body, request_id=request_id, limits=limits) as answer:
                return await answer.text()

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None,
        request_id: str,
        limits: aiohttp.ClientTimeout,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        if self._session is None:
            # No limit on connections: the engine queues requests, and a queue here would hold up its control calls.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                headers=self._headers,
                read_bufsize=MAX_LINE_BYTES,
            )
        async with self._session.request(method, self.url + path, json=body, timeout=limits) as answer:
            self._answers.add(answer)
            try:
                if not answer.ok:
                    said = one_line(await answer.text(), max_length=500)
                    raise HttpStatusError(
                        f"{method} {path} was answered with {answer.status} {answer.reason}: {said}",
                        status=answer.status,
                        server=self._server,
                        request_id=request_id,
                    )
                yield answer
            finally:
                self._answers.discard(answer)

    def _refuse_if_closed(self, request_id: str) -> None:
        if self._is_closed:
            raise ServerDied(
                "the connection was closed; make another", server=self._server, request_id=request_id
            )

    def _parsed(self, text: str, *, path: str, request_id: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadServerReply(
                f"{path} was answered with something else than JSON ({error}): {one_line(text, max_length=200)}",
                server=self._server,
                request_id=request_id,
            ) from error

    @contextmanager
    def _typed_errors(self, path: str, *, request_id: str, timeout_s: float) -> Generator[None]:
        try:
            yield
        except TimeoutError as error:
            raise ServerTimeout(
                f"no answer from {self.url}{path} within {timeout_s:g} s",
                server=self._server,
                request_id=request_id,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerDied(
                f"{self.url}{path} cannot be reached any more ({describe_error(error)}); see that the server runs",
                server=self._server,
                request_id=request_id,
            ) from error
        except RuntimeError as error:  # aiohttp's, of a session that was closed while the request began
            if not self._is_closed:
                raise
            raise ServerDied(
                f"the connection was closed ({describe_error(error)})",
                server=self._server,
                request_id=request_id,
            ) from error
        except UnicodeDecodeError as error:
            raise BadServerReply(
                f"{path} was answered with bytes that are not UTF-8",
                server=self._server,
                request_id=request_id,
            ) from error
        except (ValueError, HttpProcessingError) as error:  # aiohttp's, of a line that is too long
            raise BadServerReply(
                f"{path} was answered with something that is not an event stream ({describe_error(error)})",
                server=self._server,
                request_id=request_id,
            ) from error
