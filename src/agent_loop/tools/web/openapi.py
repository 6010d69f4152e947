"""The tools `openapi`: the operations of a web service, from its OpenAPI specification."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from agent_loop.config import PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.tools.base import BaseTool
from agent_loop.tools.environment_variables import expand_variables
from agent_loop.tools.schema import check_tool_schema
from agent_loop.tools.web.client import WebClient
from agent_loop.tools.web.json_schema import plain_schema
from agent_loop.tools.web.operation import Operation, names_in
from agent_loop.tools.web.specification import read_specification, server_url_of
from agent_loop.tools.web.tool import RequestTool

METHODS = ("get", "post", "put", "patch", "delete")
OWN_HEADERS = frozenset({"accept", "authorization", "content-type"})
"""Headers that OpenAPI excludes from parameters. Cookie parameters are ignored too."""
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_NO_WORD = re.compile(r"[^A-Za-z0-9]+")


class OpenApiConfig(Section):
    """Specification, and the selection of its operations."""

    spec: str
    """Path or URL of a JSON or YAML file."""
    operations: list[str] | None = None
    """`operationId`s of the operations that become tools; None for all."""
    exclude: list[str] = Field(default=[])
    """`operationId`s of the operations to leave out."""
    prefix: str = ""
    """Prefix of the tools' names."""
    server_url: str | None = None
    """URL of the service; None for the specification's first server."""
    headers: dict[str, str] = Field(default={})
    """Headers of every request; `$NAME` is an environment variable."""
    request_timeout_s: PositiveSeconds = 20.0


def openapi_tools(config: Mapping[str, Any]) -> list[BaseTool]:
    """Return a tool for each operation that the config selects.

    Raises:
        ConfigError: The specification cannot be read, or an operation cannot become a tool.
    """
    settings = parse_section(OpenApiConfig, config, where="the config of openapi")
    spec = read_specification(settings.spec)
    described = {operation.name: operation for operation in _operations(spec)}
    for name in [*(settings.operations or ()), *settings.exclude]:
        if name not in described:
            raise ConfigError(f"{settings.spec} has no operation {name!r}{did_you_mean(name, described)}")
    chosen = [n for n in settings.operations or described if n not in settings.exclude]
    server_url = settings.server_url or server_url_of(spec, source=settings.spec)
    headers = expand_variables(settings.headers, where="the config of openapi: headers")
    return [
        _make_tool(
            described[name],
            prefix=settings.prefix,
            server_url=server_url,
            client=WebClient(headers=headers, timeout_s=settings.request_timeout_s),
            where=f"{settings.spec}: operation {name!r}",
        )
        for name in chosen
    ]


@dataclass(frozen=True, slots=True)
class SpecOperation:
    """Operation of the specification, with references resolved."""

    name: str
    method: str
    path: str
    fields: Mapping[str, Any]
    shared_parameters: tuple[Any, ...]
    """Parameters of all operations of the path."""


def _operations(spec: Mapping[str, Any]) -> Iterable[SpecOperation]:
    paths: dict[str, dict[str, Any]] = spec.get("paths") or {}
    for path, item in paths.items():
        for method in METHODS:
            fields = item.get(method)
            if fields is not None:
                name = fields.get("operationId") or _NO_WORD.sub("_", f"{method}_{path}").strip("_")
                yield SpecOperation(name, method.upper(), path, fields, tuple(item.get("parameters") or ()))


def _make_tool(
    described: SpecOperation, *, prefix: str, server_url: str, client: WebClient, where: str
) -> RequestTool:
    properties: dict[str, Any] = {}
    required: list[str] = []
    placed: dict[str, set[str]] = {"path": set(), "query": set(), "header": set()}
    own = {
        (p["name"], p["in"]): p
        for p in (*described.shared_parameters, *(described.fields.get("parameters") or ()))
    }
    joined: set[str] = set()
    for (name, place), parameter in own.items():
        if place not in placed or (place == "header" and name.lower() in OWN_HEADERS):
            continue
        schema = plain_schema(parameter.get("schema") or {}, where=f"{where}: parameter {name!r}")
        properties[name] = {**schema, **_description(parameter)}
        placed[place].add(name)
        joined |= {name} if parameter.get("explode") is False else set()
        required += [name] if parameter.get("required") or place == "path" else []
    for name in names_in(described.path, where=f"{where}: its path"):
        if name not in placed["path"]:
            raise ConfigError(
                f"{where}: its path needs the parameter {name!r}, which it does not define; exclude it"
            )
    body, whole_body = _add_body(described, properties, required, where=where)
    function = {
        "name": prefix + _NO_NAME.sub("_", described.name),
        "description": str(described.fields.get("description") or described.fields.get("summary") or ""),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    tool_schema = {"type": "function", "function": function}
    check_tool_schema(tool_schema, where=where)
    operation = Operation(
        method=described.method,
        url=server_url.rstrip("/") + described.path,
        query=frozenset(placed["query"]),
        joined=frozenset(joined),
        headers=frozenset(placed["header"]),
        body=frozenset(body),
        whole_body=whole_body,
    )
    return RequestTool({}, tool_schema, operation=operation, client=client)


def _add_body(
    described: SpecOperation, properties: dict[str, Any], required: list[str], *, where: str
) -> tuple[set[str], str | None]:
    """Add the parameters of a JSON body, and return the names of its fields and of the argument that is the body.

    The fields become parameters. If they conflict with other parameters, or more fields are allowed, the whole body
    becomes one parameter `body`.
    """
    request = described.fields.get("requestBody")
    if not request:
        return set(), None
    content: Mapping[str, Any] = request.get("content") or {}
    kind = next((kind for kind in content if kind.partition(";")[0].endswith("json")), None)
    if kind is None:
        raise ConfigError(f"{where} accepts {', '.join(content)}, but not JSON; exclude it")
    schema = plain_schema(content[kind].get("schema") or {}, where=f"{where}: requestBody")
    fields: Mapping[str, Any] = schema.get("properties") or {}
    if fields and not set(fields) & set(properties) and "additionalProperties" not in schema:
        properties |= fields
        required += schema.get("required", []) if request.get("required") else []
        return set(fields), None
    name = "body" if "body" not in properties else "request_body"
    properties[name] = {**schema, **_description(request)}
    required += [name] if request.get("required") else []
    return set(), name


def _description(fields: Mapping[str, Any]) -> dict[str, str]:
    return {"description": fields["description"]} if fields.get("description") else {}
