"""Request template that is filled with the arguments of a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, cast
from urllib.parse import quote

from agent_loop.errors import ConfigError, ToolError, did_you_mean
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.web.client import WebClient, WebResponse

READING_METHODS = frozenset({"GET", "HEAD"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
RETRIES = 2
"""Number of retries of read-only requests."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Request template: where each argument of a call is inserted."""

    method: str
    url: str
    """URL with `{name}` where an argument is inserted."""
    query: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    """Query arguments whose lists are sent as one value with commas, not as one value per item."""
    headers: frozenset[str] = frozenset()
    body: frozenset[str] = frozenset()
    """Arguments that are fields of a JSON body."""
    whole_body: str | None = None
    """The argument that is the body itself."""
    select: tuple[str, ...] = field(default=())
    """Keys and indexes that lead to the part of a JSON response that the model is shown."""

    @property
    def on_replay(self) -> OnReplay:
        """`RECORDED` for read-only requests, which may be sent twice; `ONCE` for all others."""
        return OnReplay.RECORDED if self.method in READING_METHODS else OnReplay.ONCE

    @property
    def retries(self) -> int:
        return RETRIES if self.method in READING_METHODS else 0

    async def send(self, arguments: Mapping[str, Any], *, client: WebClient, instance_id: str) -> str:
        """Send the request and return the selected part of the response.

        Raises:
            ToolUnavailable: The service is unavailable; see `WebClient.request`.
            ToolError: The request failed; see `WebClient.request`. Or the response has nothing at `select`.
        """
        body: Any = {name: arguments[name] for name in self.body if name in arguments} or None
        if self.whole_body is not None:
            body = arguments.get(self.whole_body)
        response = await client.request(
            self.method,
            self._filled_url(arguments),
            instance_id=instance_id,
            query={
                name: self._query_value(name, arguments[name]) for name in self.query if name in arguments
            },
            headers={
                name: _header_value(name, arguments[name]) for name in self.headers if name in arguments
            },
            body=body,
        )
        return self._read(response)

    def _query_value(self, name: str, value: Any) -> Any:
        return in_one_value(value) if name in self.joined and isinstance(value, list) else value

    def _filled_url(self, arguments: Mapping[str, Any]) -> str:
        url = ""
        for literal, name, _, _ in Formatter().parse(self.url):
            url += literal
            if name is not None:
                value = quote(in_one_value(arguments[name]), safe="")
                if value in (".", ".."):  # would change the path
                    raise ToolError(f"{name} is {value!r}, which is not allowed here")
                url += value
        return url

    def _read(self, response: WebResponse) -> str:
        if not self.select:
            return response.text
        value = response.json()
        for number, key in enumerate(self.select):
            path = ".".join(self.select[: number + 1])
            if isinstance(value, list):
                items = cast(list[Any], value)
                if not key.isdecimal() or int(key) >= len(items):
                    raise ToolError(f"the response has nothing at {path!r}: a list of {len(items)} items")
                value = items[int(key)]
            elif isinstance(value, Mapping) and key in value:
                value = cast(Mapping[str, Any], value)[key]
            else:
                raise ToolError(f"the response has nothing at {path!r}")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_one_value(value: Any) -> str:
    """Format an argument for a path or a header: a list with commas, and any value other than a str as JSON."""
    if isinstance(value, list):
        return ",".join(map(in_one_value, cast(list[Any], value)))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _header_value(name: str, value: Any) -> str:
    text = in_one_value(value)
    if not text.isprintable():
        raise ToolError(f"{name} is sent in a header, so it must be one line of printable text")
    return text


def names_in(url: str, *, where: str) -> list[str]:
    """Return the parameter names in a URL template.

    Raises:
        ConfigError: The URL is not a valid template with `{name}` placeholders.
    """
    try:
        parts = list(Formatter().parse(url))
    except ValueError as error:
        raise ConfigError(f"{where} is {url!r}: {error}") from error
    for _, name, form, conversion in parts:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise ConfigError(f"{where} is {url!r}; write each argument as {{name}}")
    return [name for _, name, _, _ in parts if name is not None]


def check_names(names: Sequence[str], *, parameters: Mapping[str, Any], where: str) -> None:
    """Check that names are parameters of a tool.

    Raises:
        ConfigError: A name is not a property of the tool's parameters.
    """
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in names:
        if name not in properties:
            raise ConfigError(
                f"{where}: {name!r} is not a parameter of the tool{did_you_mean(name, properties)}"
            )
