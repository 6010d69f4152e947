"""The tool `http`: one request to a web service per call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from agent_loop.config import PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError
from agent_loop.tools.environment_variables import expand_variables
from agent_loop.tools.web.client import WebClient
from agent_loop.tools.web.operation import BODY_METHODS, Operation, check_names, names_in
from agent_loop.tools.web.tool import RequestTool


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
    """Tool that sends one request per call, from a template in its config.

    Raises:
        ConfigError: The config is invalid, or does not match the schema.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        function = tool_schema["function"]
        where = f"the config of tool {function['name']!r}"
        settings = parse_section(HttpConfig, config, where=where)
        operation = _operation(settings, function.get("parameters") or {}, where=where)
        headers = expand_variables(settings.headers, where=f"{where}: headers")
        client = WebClient(headers=headers, timeout_s=settings.request_timeout_s)
        super().__init__(config, tool_schema, operation=operation, client=client)


def _operation(settings: HttpConfig, parameters: Mapping[str, Any], *, where: str) -> Operation:
    in_url = names_in(settings.url, where=f"{where}: url")
    check_names(in_url, parameters=parameters, where=f"{where}: url")
    check_names(settings.query or [], parameters=parameters, where=f"{where}: query")
    check_names(settings.body or [], parameters=parameters, where=f"{where}: body")
    optional = [name for name in in_url if name not in parameters.get("required", [])]
    if optional:
        raise ConfigError(f"{where}: url needs {optional[0]!r}; make it a required parameter of the tool")
    has_body = settings.method in BODY_METHODS
    if settings.body and not has_body:
        raise ConfigError(f"{where}: a {settings.method} has no body; put {settings.body} into query")
    placed = {*in_url, *(settings.query or []), *(settings.body or [])}
    rest = [name for name in parameters.get("properties", {}) if name not in placed]
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
