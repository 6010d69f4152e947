"""Requests of tools: bounded in time and size, and whatever goes wrong comes out as a `ToolError`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from yarl import URL

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.runtime.boundary import describe_error, one_line
from agent_loop.tools.shared import Shared

MAX_BYTES = 2**22
"""Of one answer."""
TRY_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be others the next time."""


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """What a service answered with success."""

    status: int
    body: bytes
    charset: str

    @property
    def text(self) -> str:
        with suppress(LookupError, ValueError):  # names of what is no encoding of text, such as base64
            return self.body.decode(self.charset, "replace")
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Raises: ToolError: It is no JSON."""
        try:
            return json.loads(self.text.removeprefix("\N{BYTE ORDER MARK}"))
        except (ValueError, RecursionError) as error:
            raise ToolError(
                f"the service answered no JSON: {one_line(self.text, max_length=200)!r}"
            ) from error


class WebClient:
    """Connections that a tool's trajectories share; no cookies are kept, so that none sees what another did.

    Args:
        headers: Sent with every request.
        timeout_s: Of one request, from the first byte to the last.
    """

    def __init__(self, *, headers: Mapping[str, str], timeout_s: float) -> None:
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._shared = Shared(self._open, close_as=_close)

    async def join(self, instance_id: str) -> None:
        """Opens what a trajectory needs for its requests; whoever joins must leave."""
        await self._shared.join(instance_id)

    async def leave(self, instance_id: str) -> None:
        """The last one to leave closes the connections."""
        await self._shared.leave(instance_id)

    async def request(
        self,
        method: str,
        url: str,
        *,
        instance_id: str,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> WebAnswer:
        """One request of a URL in which what needs quoting is quoted; a `body` is sent as JSON.

        Raises:
            ToolUnavailable: There was no connection, no answer in time, or a status that may be another next time.
            ToolError: The service refused the request, or answered too much.
        """
        session = await self._shared.join(instance_id)
        sent: dict[str, Any] = {"params": _query(query or {}), "headers": headers or {}}
        if body is not None:
            sent["json"] = body
        try:
            async with session.request(method, URL(url, encoded=True), **sent) as answer:
                content = bytearray()
                while len(content) <= MAX_BYTES and (more := await answer.content.read(2**16)):
                    content += more
                return _checked(WebAnswer(answer.status, bytes(content), answer.charset or "utf-8"))
        except ValueError as error:  # of the URL
            raise ToolError(f"{url!r} cannot be asked: {describe_error(error)}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = (
                f"no answer in {self._timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else describe_error(error)
            )
            raise ToolUnavailable(f"the service could not be reached: {reason}") from error

    async def _open(self) -> aiohttp.ClientSession:
        limits = aiohttp.ClientTimeout(total=self._timeout_s)
        watch = aiohttp.TraceConfig()
        watch.on_request_redirect.append(_stay)
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=limits,
            trace_configs=[watch] if self._headers else [],
            cookie_jar=aiohttp.DummyCookieJar(),
        )


async def _stay(
    session: aiohttp.ClientSession, context: Any, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    """The tool's headers may hold secrets, which are no other host's business."""
    answer = redirect.response
    target = redirect.url.join(URL(answer.headers.get("Location", "")))
    if target.host != redirect.url.host:
        answer.close()
        raise ToolError(f"the service redirects to another host, {target.host!r}")


async def _close(session: aiohttp.ClientSession) -> None:
    await session.close()


def _query(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A list is sent as one pair per item; null is left out."""
    pairs: list[tuple[str, str]] = []
    for name, value in query.items():
        values = cast(list[Any], value) if isinstance(value, list) else [value]
        pairs += [(name, _query_text(item)) for item in values if item is not None]
    return pairs


def _query_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _checked(answer: WebAnswer) -> WebAnswer:
    if answer.status >= 400:
        kind = ToolUnavailable if answer.status in TRY_LATER else ToolError
        said = one_line(answer.text, max_length=300)
        raise kind(f"the service answered with status {answer.status}" + (f": {said}" if said else ""))
    if len(answer.body) > MAX_BYTES:
        raise ToolError(f"the service answered with more than {MAX_BYTES} bytes; ask for less")
    return answer
