"""One request that a tool's arguments are put into."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, cast
from urllib.parse import quote

from agent_loop.errors import ConfigError, ToolError, did_you_mean
from agent_loop.runtime.boundary import OnReplay
from agent_loop.tools.web.client import WebAnswer, WebClient

READING_METHODS = frozenset({"GET", "HEAD"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
RETRIES = 2
"""Of requests that only read."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Where each argument goes."""

    method: str
    url: str
    """With `{name}` for what an argument fills."""
    query: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    """Of the query: lists that are one value with commas in it, not one value per item."""
    headers: frozenset[str] = frozenset()
    body: frozenset[str] = frozenset()
    """Arguments that are the fields of a JSON object."""
    whole_body: str | None = None
    """The argument that is the body itself."""
    select: tuple[str, ...] = field(default=())
    """Keys and indexes that lead to what the model is shown of a JSON answer."""

    @property
    def on_replay(self) -> OnReplay:
        """A request that only reads may be sent twice; of any other, only its owner knows."""
        return OnReplay.RECORDED if self.method in READING_METHODS else OnReplay.ONCE

    @property
    def retries(self) -> int:
        return RETRIES if self.method in READING_METHODS else 0

    async def send(self, arguments: Mapping[str, Any], *, client: WebClient, instance_id: str) -> str:
        """Sends the request and reads the answer.

        Raises:
            ToolUnavailable: As `WebClient.request`.
            ToolError: As `WebClient.request`; or nothing is where `select` leads.
        """
        body: Any = {name: arguments[name] for name in self.body if name in arguments} or None
        if self.whole_body is not None:
            body = arguments.get(self.whole_body)
        answer = await client.request(
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
        return self._read(answer)

    def _query_value(self, name: str, value: Any) -> Any:
        return in_one_value(value) if name in self.joined and isinstance(value, list) else value

    def _filled_url(self, arguments: Mapping[str, Any]) -> str:
        url = ""
        for literal, name, _, _ in Formatter().parse(self.url):
            url += literal
            if name is not None:
                value = quote(in_one_value(arguments[name]), safe="")
                if value in (".", ".."):  # would lead to another place
                    raise ToolError(f"{name} is {value!r}, which is not allowed here")
                url += value
        return url

    def _read(self, answer: WebAnswer) -> str:
        if not self.select:
            return answer.text
        value = answer.json()
        for number, key in enumerate(self.select):
            place = ".".join(self.select[: number + 1])
            if isinstance(value, list):
                items = cast(list[Any], value)
                if not key.isdecimal() or int(key) >= len(items):
                    raise ToolError(f"the answer has nothing at {place!r}: a list of {len(items)} items")
                value = items[int(key)]
            elif isinstance(value, Mapping) and key in value:
                value = cast(Mapping[str, Any], value)[key]
            else:
                raise ToolError(f"the answer has nothing at {place!r}")
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def in_one_value(value: Any) -> str:
    """An argument as paths and headers have it: a list with commas, what is no text as JSON."""
    if isinstance(value, list):
        return ",".join(map(in_one_value, cast(list[Any], value)))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _header_value(name: str, value: Any) -> str:
    text = in_one_value(value)
    if not text.isprintable():
        raise ToolError(f"{name} goes into a header, which holds one line of printable text")
    return text


def names_in(url: str, *, where: str) -> list[str]:
    """The names that a URL's template asks for.

    Raises:
        ConfigError: It is no template of `{name}`s.
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
    """Raises: ConfigError: One is no property of a tool's parameters."""
    properties: Mapping[str, Any] = parameters.get("properties", {})
    for name in names:
        if name not in properties:
            raise ConfigError(
                f"{where}: {name!r} is no parameter of the tool{did_you_mean(name, properties)}"
            )
