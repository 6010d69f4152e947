"""The tools `openapi`: one tool per operation of an OpenAPI specification."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urljoin
from urllib.request import urlopen

import yaml
from pydantic import Field

from agent_loop.config import PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import YamlLoader, reason, without_references
from agent_loop.tools.base import BaseTool
from agent_loop.tools.registry import expand_variables
from agent_loop.tools.schema import check_tool_schema
from agent_loop.tools.web.client import WebClient
from agent_loop.tools.web.http import Operation, RequestTool, names_in

METHODS = ("get", "post", "put", "patch", "delete")
OWN_HEADERS = frozenset({"accept", "authorization", "content-type"})
"""Headers that OpenAPI excludes from parameters. Cookie parameters are ignored too."""
FETCH_TIMEOUT_S = 30.0


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
    """Return a tool for each operation that the config selects."""
    settings = parse_section(OpenApiConfig, config, where="the config of openapi")
    spec = read_specification(settings.spec)
    described = {operation.name: operation for operation in _operations(spec)}
    for name in [*(settings.operations or ()), *settings.exclude]:
        if name not in described:
            raise ConfigError(f"{settings.spec} has no operation {name!r}{did_you_mean(name, described)}")
    server_url = settings.server_url or server_url_of(spec, source=settings.spec)
    headers = expand_variables(settings.headers, where="the config of openapi: headers")
    return [
        _make_tool(
            described[name],
            spec,
            prefix=settings.prefix,
            server_url=server_url,
            client=WebClient(headers=headers, timeout_s=settings.request_timeout_s),
            where=f"{settings.spec}: operation {name!r}",
        )
        for name in settings.operations or described
        if name not in settings.exclude
    ]


@dataclass(frozen=True, slots=True)
class SpecOperation:
    """Operation of the specification."""

    name: str
    method: str
    path: str
    fields: Mapping[str, Any]
    shared_parameters: tuple[Any, ...]
    """Parameters of all operations of the path."""


def _operations(spec: Mapping[str, Any]) -> Iterator[SpecOperation]:
    paths: dict[str, dict[str, Any]] = spec.get("paths") or {}
    for path, item in paths.items():
        for method in METHODS:
            fields = item.get(method)
            if fields is not None:
                name = fields.get("operationId") or re.sub(r"[^A-Za-z0-9]+", "_", f"{method}_{path}").strip(
                    "_"
                )
                yield SpecOperation(name, method.upper(), path, fields, tuple(item.get("parameters") or ()))


def _make_tool(
    described: SpecOperation,
    spec: Mapping[str, Any],
    *,
    prefix: str,
    server_url: str,
    client: WebClient,
    where: str,
) -> RequestTool:
    fields = described.fields
    inputs: Mapping[str, Any] = {
        "parameters": [*described.shared_parameters, *(fields.get("parameters") or ())],
        "requestBody": fields.get("requestBody") or {},
    }
    inputs = without_references(inputs, root=spec)
    if "'$ref':" in str(inputs):
        raise ConfigError(
            f"{where} refers to what its document does not contain, or is too large for a model to read; exclude it"
        )
    properties: dict[str, Any] = {}
    required: list[str] = []
    placed: dict[str, set[str]] = {"path": set(), "query": set(), "header": set()}
    joined: set[str] = set()
    for (name, place), parameter in {(p["name"], p["in"]): p for p in inputs["parameters"]}.items():
        if place not in placed or (place == "header" and name.lower() in OWN_HEADERS):
            continue
        properties[name] = _described(parameter.get("schema") or {}, by=parameter)
        placed[place].add(name)
        joined |= {name} if parameter.get("explode") is False else set()
        required += [name] if parameter.get("required") or place == "path" else []
    for name in names_in(described.path, where=f"{where}: its path"):
        if name not in placed["path"]:
            raise ConfigError(
                f"{where}: its path needs the parameter {name!r}, which it does not define; exclude it"
            )
    body, whole_body = _add_body(inputs["requestBody"], properties, required, where=where)
    function = {
        "name": prefix + re.sub(r"[^A-Za-z0-9_-]+", "_", described.name),
        "description": str(fields.get("description") or fields.get("summary") or ""),
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
    request: Mapping[str, Any], properties: dict[str, Any], required: list[str], *, where: str
) -> tuple[set[str], str | None]:
    """Add the parameters of a JSON body, and return the names of its fields and of the argument that is the body.

    The fields become parameters. If they conflict with other parameters, or more fields are allowed, the whole body
    becomes one parameter `body`.
    """
    if not request:
        return set(), None
    content: Mapping[str, Any] = request.get("content") or {}
    kind = next((kind for kind in content if kind.partition(";")[0].endswith("json")), None)
    if kind is None:
        raise ConfigError(f"{where} accepts {', '.join(content)}, but not JSON; exclude it")
    schema = _described(content[kind].get("schema") or {}, by=request)
    fields: Mapping[str, Any] = schema.get("properties") or {}
    if fields and not set(fields) & set(properties) and "additionalProperties" not in schema:
        properties |= fields
        required += schema.get("required", []) if request.get("required") else []
        return set(fields), None
    name = "body" if "body" not in properties else "request_body"
    properties[name] = schema
    required += [name] if request.get("required") else []
    return set(), name


def _described(schema: Any, *, by: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in JSON schema's keywords, with the description of its parameter or body if that has one."""
    return plain_schema(schema) | ({"description": by["description"]} if by.get("description") else {})


_NOISE = frozenset({"discriminator", "example", "externalDocs", "nullable", "title", "xml"})
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def plain_schema(node: Any) -> Any:
    """Return a schema without the keywords of OpenAPI: `nullable` becomes a type, exclusive bounds become numbers."""
    if isinstance(node, list):
        return [plain_schema(item) for item in cast(list[Any], node)]
    if not isinstance(node, Mapping):
        return node
    schema = cast(Mapping[str, Any], node)
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("patternProperties", "properties"):
            plain[key] = {name: plain_schema(inner) for name, inner in value.items()}
        elif key in ("const", "default", "enum", "examples"):
            plain[key] = value
        elif key not in _NOISE and not (key in _BOUNDS and isinstance(value, bool)):
            plain[key] = plain_schema(value)
    for exclusive, inclusive in _BOUNDS.items():
        if schema.get(exclusive) is True and inclusive in plain:
            plain[exclusive] = plain.pop(inclusive)
    if schema.get("nullable") and isinstance(plain.get("type"), str):
        plain["type"] = [plain["type"], "null"]
    return plain


def read_specification(source: str) -> Mapping[str, Any]:
    """Read a specification.

    Args:
        source: Path or URL of a JSON or YAML file.
    """
    try:
        if source.startswith(("http://", "https://")):
            with urlopen(source, timeout=FETCH_TIMEOUT_S) as answer:
                text = answer.read().decode()
        else:
            text = Path(source).read_text(encoding="utf-8")
        spec: Any = _parse_spec(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"the specification {source!r} cannot be read: {reason(error)}") from error
    fields = cast(dict[str, Any], spec) if isinstance(spec, dict) else {}
    if not str(fields.get("openapi")).startswith("3."):
        raise ConfigError(f"{source!r} is not an OpenAPI 3 specification")
    return fields


def _parse_spec(text: str) -> Any:
    """Parse JSON or YAML. JSON is tried first, since the YAML parser takes a hundred times as long for it."""
    with suppress(ValueError):
        return json.loads(text)
    return yaml.load(text, Loader=YamlLoader)


def server_url_of(spec: Mapping[str, Any], *, source: str) -> str:
    """Return the URL of a specification's first server, with the defaults of its variables."""
    servers: list[Any] = spec.get("servers") or []
    server: Mapping[str, Any] = servers[0] if servers else {}
    url = str(server.get("url", ""))
    variables: Mapping[str, Mapping[str, Any]] = server.get("variables") or {}
    for name, variable in variables.items():
        url = url.replace(f"{{{name}}}", str(variable.get("default", "")))
    if source.startswith(("http://", "https://")):
        url = urljoin(source, url or "/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{source!r} has no server URL; set server_url")
    return url
