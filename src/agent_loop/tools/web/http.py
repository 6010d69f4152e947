"""Tools whose calls are HTTP requests, and the tool `http`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal, cast
from urllib.parse import quote

from pydantic import Field

from agent_loop.config import PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError, ToolError, did_you_mean
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.registry import expand_variables
from agent_loop.tools.web.client import WebClient, WebResponse

BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
RETRIES = 2
"""Number of retries of a GET request."""


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
    select: tuple[str, ...] = ()
    """Keys and indexes that lead to the part of a JSON response that the model is shown."""


class RequestTool(BaseTool):
    """Tool that sends one request per call and returns the response.

    A GET request may be sent twice and is retried. For any other request, `on_replay` is `once` unless the entry in the
    registry sets it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tool_schema: Mapping[str, Any],
        *,
        operation: Operation,
        client: WebClient,
    ) -> None:
        super().__init__(config, tool_schema)
        only_reads = operation.method == "GET"
        self.on_replay = OnReplay.RECORDED if only_reads else OnReplay.ONCE
        self.retries = RETRIES if only_reads else 0
        self._operation = operation
        self._client = client

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Send the request, and return the selected part of the response."""
        to = self._operation
        query, headers, body = (
            {name: value for name, value in parameters.items() if name in names}
            for names in (to.query, to.headers, to.body)
        )
        for name in to.joined & query.keys():
            query[name] = in_one_value(query[name])
        response = await self._client.request(
            to.method,
            _filled(to.url, parameters),
            instance_id=instance_id,
            query=query,
            headers={name: _header_value(name, value) for name, value in headers.items()},
            body=(body or None) if to.whole_body is None else parameters.get(to.whole_body),
        )
        return ToolResponse(text=_selected(response, to.select)), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._client.release(instance_id)


def _filled(template: str, arguments: Mapping[str, Any]) -> str:
    url = ""
    for literal, name, _, _ in Formatter().parse(template):
        url += literal
        if name is not None:
            value = quote(in_one_value(arguments[name]), safe="")
            if value in (".", ".."):  # would change the path
                raise ToolError(f"{name} is {value!r}, which is not allowed here")
            url += value
    return url


def _selected(response: WebResponse, path: tuple[str, ...]) -> str:
    if not path:
        return response.text
    value = response.json()
    for number, key in enumerate(path, start=1):
        where = ".".join(path[:number])
        if isinstance(value, list):
            items = cast(list[Any], value)
            if not key.isdecimal() or int(key) >= len(items):
                raise ToolError(f"the response has nothing at {where!r}: a list of {len(items)} items")
            value = items[int(key)]
        elif isinstance(value, Mapping) and key in value:
            value = cast(Mapping[str, Any], value)[key]
        else:
            raise ToolError(f"the response has nothing at {where!r}")
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
    """Return the parameter names in a URL template."""
    try:
        parts = list(Formatter().parse(url))
    except ValueError as error:
        raise ConfigError(f"{where} is {url!r}: {error}") from error
    for _, name, form, conversion in parts:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise ConfigError(f"{where} is {url!r}; write each argument as {{name}}")
    return [name for _, name, _, _ in parts if name is not None]


class HttpConfig(Section):
    """Template of a request. The parameters of the tool's schema fill it."""

    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    url: str
    """URL with `{name}` where a parameter is inserted. Inserted values are quoted."""
    headers: dict[str, str] = Field(default={})
    """Headers of every request; `$NAME` is an environment variable."""
    query: list[str] | None = None
    """Parameters that go into the query. For None, all remaining parameters do if the method has no body."""
    body: list[str] | None = None
    """Parameters that are fields of a JSON body. For None, all remaining parameters are if the method has a body."""
    select: str = ""
    """Path of keys and indexes to the part of a JSON response that the model is shown, as in `results.0.text`."""
    request_timeout_s: PositiveSeconds = 20.0


class HttpTool(RequestTool):
    """Tool that sends one request per call, from a template in its config."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        function = tool_schema["function"]
        where = f"the config of tool {function['name']!r}"
        settings = parse_section(HttpConfig, config, where=where)
        operation = _operation(settings, function.get("parameters") or {}, where=where)
        headers = expand_variables(settings.headers, where=f"{where}: headers")
        client = WebClient(headers=headers, timeout_s=settings.request_timeout_s)
        super().__init__(config, tool_schema, operation=operation, client=client)


def _operation(settings: HttpConfig, parameters: Mapping[str, Any], *, where: str) -> Operation:
    properties: Mapping[str, Any] = parameters.get("properties", {})
    in_url = names_in(settings.url, where=f"{where}: url")
    placed = [*in_url, *(settings.query or []), *(settings.body or [])]
    for name in placed:
        if name not in properties:
            raise ConfigError(
                f"{where}: {name!r} is not a parameter of the tool{did_you_mean(name, properties)}"
            )
    for name in in_url:
        if name not in parameters.get("required", []):
            raise ConfigError(f"{where}: url needs {name!r}; make it a required parameter of the tool")
    has_body = settings.method in BODY_METHODS
    if settings.body and not has_body:
        raise ConfigError(f"{where}: a {settings.method} has no body; put {settings.body} into query")
    rest = [name for name in properties if name not in placed]
    query = settings.query if settings.query is not None else [] if has_body else rest
    body = settings.body if settings.body is not None else rest if has_body else []
    lost = set(rest) - {*query, *body}
    if lost:
        raise ConfigError(f"{where}: the parameter {min(lost)!r} is not used; add it to query or to body")
    return Operation(
        method=settings.method,
        url=settings.url,
        query=frozenset(query),
        body=frozenset(body),
        select=tuple(filter(None, settings.select.split("."))),
    )
