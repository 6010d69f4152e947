"""HTTP client of tools, with limits on time and size. Every failure is raised as a `ToolError`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from yarl import URL

from agent_loop.errors import ToolError, ToolUnavailable
from agent_loop.runtime.describe import describe_error, one_line

MAX_BYTES = 2**22
"""Maximum size of a response."""
TRY_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes after which the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class WebResponse:
    """Response of a web service."""

    status: int
    body: bytes
    charset: str

    @property
    def text(self) -> str:
        with suppress(LookupError, ValueError):  # not the name of a text encoding
            return self.body.decode(self.charset, "replace")
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Parse the body as JSON."""
        try:
            return json.loads(self.text.removeprefix("\N{BYTE ORDER MARK}"))
        except (ValueError, RecursionError) as error:
            raise ToolError(
                f"the service did not return valid JSON: {one_line(self.text, max_length=200)!r}"
            ) from error


class WebClient:
    """HTTP client of a tool. Each trajectory has connections of its own. No cookies are kept."""

    def __init__(self, *, headers: Mapping[str, str], timeout_s: float) -> None:
        self._headers = dict(headers)
        self._timeout_s = timeout_s
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def request(
        self,
        method: str,
        url: str,
        *,
        instance_id: str,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> WebResponse:
        """Send one request of a trajectory and return the response. Call `release` after the last one.

        `url` must be quoted; `body` is sent as JSON.
        """
        if instance_id not in self._sessions:
            self._sessions[instance_id] = self._open()
        session = self._sessions[instance_id]
        sent: dict[str, Any] = {"params": _query(query or {}), "headers": headers or {}}
        if body is not None:
            sent["json"] = body
        try:
            async with session.request(method, URL(url, encoded=True), **sent) as response:
                content = bytearray()
                while len(content) <= MAX_BYTES and (more := await response.content.read(2**16)):
                    content += more
                answer = WebResponse(response.status, bytes(content), response.charset or "utf-8")
        except ValueError as error:  # the URL is invalid
            raise ToolError(f"the request to {url!r} cannot be sent: {describe_error(error)}") from error
        except TimeoutError as error:
            limit = f"no response in {self._timeout_s:g} s"
            raise ToolUnavailable(f"the service could not be reached: {limit}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ToolUnavailable(f"the service could not be reached: {describe_error(error)}") from error
        if answer.status >= 400:
            kind = ToolUnavailable if answer.status in TRY_LATER else ToolError
            detail = one_line(answer.text, max_length=300)
            raise kind(f"the service returned status {answer.status}" + (f": {detail}" if detail else ""))
        if len(content) > MAX_BYTES:
            raise ToolError(f"the service returned more than {MAX_BYTES} bytes; request less")
        return answer

    async def release(self, instance_id: str) -> None:
        """Close the connections of a trajectory."""
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse_other_host)
        return aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            trace_configs=[trace] if self._headers else [],
            cookie_jar=aiohttp.DummyCookieJar(),
        )


async def _refuse_other_host(
    session: aiohttp.ClientSession, context: Any, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    """Refuse a redirect to another host, since the tool's headers may contain secrets."""
    response = redirect.response
    target = redirect.url.join(URL(response.headers.get("Location", "")))
    if target.host != redirect.url.host:
        response.close()
        raise ToolError(f"the service redirects to another host, {target.host!r}")


def _query(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of a query string. A list becomes one pair per item; None is omitted."""
    return [
        (name, item if isinstance(item, str) else json.dumps(item))
        for name, value in query.items()
        for item in (cast(list[Any], value) if isinstance(value, list) else [value])
        if item is not None
    ]
