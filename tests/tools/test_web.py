from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent_loop.errors import ConfigError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool
from agent_loop.tools.registry import load_tools
from agent_loop.tools.results import ToolResult
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.tools.web import client
from agent_loop.tools.web.http import HttpTool
from agent_loop.tools.web.openapi import openapi_tools
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall
from tests.tools.web_service import serving


def ask(tools: dict[str, BaseTool], *the_calls: ToolCall) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        session = ToolSession(tools, config=ToolSessionConfig(timeout_s=20, close_timeout_s=5))
        results = [await session.execute(call) for call in the_calls]
        assert await session.close() == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return results

    return asyncio.run(main())


def schema(name: str, *required: str, **properties: str) -> dict[str, Any]:
    types = {key: {"type": type_} for key, type_ in properties.items()}
    parameters = {"type": "object", "properties": types, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = schema("weather", "city", city="string", days="integer", tags="array")


def kind_of(result: ToolResult) -> IncidentKind | None:
    return None if result.incident is None else result.incident.kind


async def echo(request: web.Request) -> web.Response:
    body = await request.text()
    return web.json_response(
        {
            "method": request.method,
            "path": request.raw_path,
            "body": json.loads(body) if body else None,
            "token": request.headers.get("Authorization"),
            "trace": request.headers.get("X-Trace"),
            "items": [{"text": "first"}, {"text": "second"}],
        }
    )


ECHO = web.route("*", "/{rest:.*}", echo)


def test_the_arguments_of_a_get_fill_the_url_and_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEATHER_TOKEN", "xyzzy")
    with serving(ECHO) as url:
        config = {"url": f"{url}/at/{{city}}", "headers": {"Authorization": "Bearer $WEATHER_TOKEN"}}
        tool = HttpTool(config, WEATHER)
        call = ToolCall("weather", {"city": "a/../b?c&é", "days": 3, "tags": ["x", "y z"]})
        [result] = ask({"weather": tool}, call)
    said = json.loads(str(result.response.text))
    assert said["method"] == "GET"
    assert said["path"].startswith("/at/a%2F..%2Fb%3Fc%26%C3%A9?")
    assert set(said["path"].partition("?")[2].split("&")) == {"days=3", "tags=x", "tags=y+z"}
    assert said["token"] == "Bearer xyzzy"
    assert (tool.on_replay, tool.retries) == (OnReplay.RECORDED, 2)


def test_a_post_sends_json_and_returns_the_selected_part() -> None:
    with serving(ECHO) as url:
        config = {"method": "POST", "url": f"{url}/at/{{city}}", "query": ["days"], "select": "body"}
        first = HttpTool(config, WEATHER)
        second = HttpTool({**config, "select": "items.1.text"}, WEATHER)
        third = HttpTool({**config, "select": "items.7.text"}, WEATHER)
        call = ToolCall("weather", {"city": "Ulm", "days": 3, "tags": ["x"]})
        [shown] = ask({"weather": first}, call)
        [selected] = ask({"weather": second}, call)
        [missing] = ask({"weather": third}, call)
    assert json.loads(str(shown.response.text)) == {"tags": ["x"]}
    assert selected.response.text == "second"
    assert missing.response.text == "the response has nothing at 'items.7': a list of 2 items"
    assert (first.on_replay, first.retries) == (OnReplay.ONCE, 0)


def test_a_value_that_would_change_the_path_is_refused() -> None:
    tool = HttpTool({"url": "http://127.0.0.1:9/at/{city}/secret"}, WEATHER)
    [result] = ask({"weather": tool}, ToolCall("weather", {"city": ".."}))
    assert kind_of(result) is IncidentKind.TOOL_ERROR


def test_errors_of_the_service_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 1000)
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(what := request.match_info["city"])
        if what == "large":
            return web.Response(text="x" * 2000)
        if what == "odd":
            return web.Response(body=b"caf\xe9", headers={"Content-Type": "text/plain; charset=nonsense"})
        if what == "latin":
            return web.Response(body=b"caf\xe9", headers={"Content-Type": "text/plain; charset=latin-1"})
        if what == "base64":
            return web.Response(body=b"Zm9v", headers={"Content-Type": "text/plain; charset=base64"})
        return web.Response(status=int(what), text="no\nsuch  city")

    with serving(web.get("/{city}", answer)) as url:
        tool = HttpTool({"url": f"{url}/{{city}}"}, WEATHER)
        cities = ["404", "429", "large", "odd", "latin", "base64"]
        results = ask({"weather": tool}, *(ToolCall("weather", {"city": city}) for city in cities))
    assert [kind_of(result) for result in results] == [
        IncidentKind.TOOL_ERROR,
        IncidentKind.TOOL_UNAVAILABLE,
        IncidentKind.TOOL_ERROR,
        *[None] * 3,
    ]
    assert results[0].response.text == "the service returned status 404: no such city"
    assert asked.count("429") == 3
    assert [result.response.text for result in results[4:]] == ["café", "Zm9v"]


def test_a_response_that_is_not_json_is_reported_to_the_model() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text={"deep": "[" * 100_000, "words": "sorry"}[request.match_info["city"]])

    with serving(web.get("/{city}", answer)) as url:
        tool = HttpTool({"url": f"{url}/{{city}}", "select": "0"}, WEATHER)
        results = ask({"weather": tool}, *(ToolCall("weather", {"city": city}) for city in ("deep", "words")))
    assert [kind_of(result) for result in results] == [IncidentKind.TOOL_ERROR] * 2
    assert results[1].response.text == "the service did not return valid JSON: 'sorry'"


def test_headers_with_secrets_are_not_sent_to_other_hosts() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        if request.path == "/away":
            raise web.HTTPFound(f"http://localhost:{request.url.port}/end")
        if request.path == "/on":
            raise web.HTTPFound("/end")
        return web.Response(text="there")

    with serving(web.get("/{city}", answer)) as url:
        config = {"url": f"{url}/{{city}}"}
        guarded, open_to_all = (
            HttpTool({**config, "headers": {"X-Key": "xyzzy"}}, WEATHER),
            HttpTool(config, WEATHER),
        )
        refused, followed = ask(
            {"weather": guarded}, *(ToolCall("weather", {"city": c}) for c in ("away", "on"))
        )
        assert seen == ["/away", "/on", "/end"]
        [elsewhere] = ask({"weather": open_to_all}, ToolCall("weather", {"city": "away"}))
    assert refused.response.text == "the service redirects to another host, 'localhost'"
    assert followed.response.text == elsewhere.response.text == "there"


def test_trajectories_do_not_share_cookies() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("Cookie", "none"), headers={"Set-Cookie": "who=me"})

    with serving(web.get("/{city}", answer)) as url:
        tool = HttpTool({"url": f"{url.replace('127.0.0.1', 'localhost')}/{{city}}"}, WEATHER)
        results = ask({"weather": tool}, *[ToolCall("weather", {"city": "x"})] * 2)
    assert [result.response.text for result in results] == ["none", "none"]


def test_no_argument_can_add_a_header(tmp_path: Path) -> None:
    config = {"spec": write_spec(tmp_path), "operations": ["get_item"], "server_url": "http://127.0.0.1:9"}
    [tool] = openapi_tools(config)
    [result] = ask({"get_item": tool}, ToolCall("get_item", {"id": 1, "X-Trace": "a\r\nX-Admin: yes"}))
    assert kind_of(result) is IncidentKind.TOOL_ERROR
    assert "X-Trace is sent in a header, so it must be one line" in str(result.response.text)


def test_a_slow_service_is_unavailable_and_a_post_is_not_retried() -> None:
    asked: list[str] = []

    async def never(request: web.Request) -> web.Response:
        asked.append(request.method)
        await asyncio.sleep(5)
        return web.Response()

    with serving(web.post("/{city}", never)) as url:
        config = {"method": "POST", "url": f"{url}/{{city}}", "request_timeout_s": 0.1}
        [result] = ask({"weather": HttpTool(config, WEATHER)}, ToolCall("weather", {"city": "Ulm"}))
    assert kind_of(result) is IncidentKind.TOOL_UNAVAILABLE
    assert result.response.text == "the service could not be reached: no response in 0.1 s"
    assert asked == ["POST"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"url": "http://x/{town}"}, "'town' is not a parameter"),
        ({"url": "http://x/{days}"}, "make it a required parameter"),
        ({"url": "http://x/{city"}, "url is"),
        ({"url": "http://x/{city!r}"}, "write each argument as"),
        ({"url": "http://x/{city}", "body": ["days"]}, "has no body"),
        ({"url": "http://x/{city}", "method": "POST", "query": [], "body": ["days"]}, "'tags' is not used"),
        (
            {"url": "http://x/{city}", "headers": {"X": "$NO_SUCH_VARIABLE"}},
            "NO_SUCH_VARIABLE, which is not set",
        ),
        ({"url": "http://x/{city}", "methd": "POST"}, "did you mean 'method'"),
    ],
)
def test_a_config_that_does_not_match_the_schema_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpTool(config, WEATHER)


SPEC: dict[str, Any] = {
    "openapi": "3.0.3",
    "info": {"title": "Shop", "version": "1"},
    "paths": {
        "/items/{id}": {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "get": {
                "operationId": "get_item",
                "summary": "Looks an item up.",
                "parameters": [
                    {
                        "name": "fields",
                        "in": "query",
                        "schema": {"type": "array", "items": {"type": "string"}, "nullable": True},
                    },
                    {"name": "X-Trace", "in": "header", "schema": {"type": "string"}},
                    {"name": "session", "in": "cookie", "schema": {"type": "string"}},
                ],
            },
            "put": {
                "operationId": "put_item",
                "description": "Changes an item.",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Item"}}},
                },
            },
        },
        "/items": {
            "post": {
                "description": "Adds items.",
                "requestBody": {
                    "content": {
                        "application/json": {
                            "schema": {"type": "array", "items": {"$ref": "#/components/schemas/Item"}}
                        }
                    }
                },
            }
        },
        "/trees": {
            "post": {
                "operationId": "add_tree",
                "requestBody": {
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Tree"}}}
                },
            }
        },
    },
    "components": {
        "parameters": {
            "Id": {
                "name": "id",
                "in": "path",
                "required": True,
                "description": "The item's number.",
                "schema": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
            }
        },
        "schemas": {
            "Item": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "example": "pen"},
                    "price": {"$ref": "#/components/schemas/Price"},
                },
            },
            "Price": {"type": "number", "nullable": True},
            "Tree": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/components/schemas/Tree"}}},
            },
        },
    },
}


def write_spec(folder: Path, spec: dict[str, Any] = SPEC) -> str:
    path = folder / "shop.json"
    path.write_text(json.dumps(spec))
    return str(path)


def test_operations_become_tools_with_their_schemas(tmp_path: Path) -> None:
    config = {
        "spec": write_spec(tmp_path),
        "server_url": "http://x",
        "prefix": "shop_",
    }
    tools = {tool.name: tool for tool in openapi_tools(config)}
    assert list(tools) == ["shop_get_item", "shop_put_item", "shop_post_items", "shop_add_tree"]
    function = tools["shop_get_item"].tool_schema["function"]
    assert function["description"] == "Looks an item up."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "exclusiveMinimum": 0, "description": "The item's number."},
            "fields": {"type": ["array", "null"], "items": {"type": "string"}},
            "X-Trace": {"type": "string"},
        },
        "required": ["id"],
    }
    put = tools["shop_put_item"].tool_schema["function"]["parameters"]
    assert put["properties"]["price"] == {"type": ["number", "null"]}
    assert put["required"] == ["id", "name"]
    assert list(tools["shop_post_items"].tool_schema["function"]["parameters"]["properties"]) == ["body"]
    tree = tools["shop_add_tree"].tool_schema["function"]["parameters"]["properties"]
    assert tree["children"] == {"type": "array", "items": {"type": "object"}}
    assert tools["shop_get_item"].on_replay is OnReplay.RECORDED
    assert tools["shop_put_item"].on_replay is OnReplay.ONCE


def test_operations_are_sent_as_the_specification_defines(tmp_path: Path) -> None:
    with serving(ECHO) as url:
        (tmp_path / "tools.yaml").write_text(
            f"""
            tools:
              - class_name: openapi
                timeout_s: 7
                config:
                  spec: {write_spec(tmp_path)}
                  server_url: {url}/v1/
                  exclude: [add_tree]
            """
        )
        tools = load_tools([], config_path=tmp_path / "tools.yaml")
        results = ask(
            tools,
            ToolCall("get_item", {"id": 7, "fields": ["a", "b"], "X-Trace": "t"}),
            ToolCall("put_item", {"id": 7, "name": "pen", "price": None}),
            ToolCall("post_items", {"body": [{"name": "pen"}]}),
            ToolCall("get_item", {"id": 0}),
        )
    assert {tool.timeout_s for tool in tools.values()} == {7.0}
    got, put, post = [json.loads(str(result.response.text)) for result in results[:3]]
    assert (got["method"], got["path"], got["trace"]) == ("GET", "/v1/items/7?fields=a&fields=b", "t")
    assert (put["method"], put["path"], put["body"]) == ("PUT", "/v1/items/7", {"name": "pen", "price": None})
    assert (post["method"], post["body"]) == ("POST", [{"name": "pen"}])
    assert kind_of(results[3]) is IncidentKind.INVALID_ARGUMENTS


def test_a_specification_is_fetched_from_its_service() -> None:
    spec = {**SPEC, "servers": [{"url": "/v2"}]}

    async def describe(request: web.Request) -> web.Response:
        return web.json_response(spec)

    with serving(web.get("/openapi.json", describe), web.get("/v2/{rest:.*}", echo)) as url:
        tools = openapi_tools({"spec": f"{url}/openapi.json", "operations": ["get_item"]})
        [result] = ask({"get_item": tools[0]}, ToolCall("get_item", {"id": 1}))
    assert json.loads(str(result.response.text))["path"] == "/v2/items/1"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"operations": ["get_itm"]}, "did you mean 'get_item'"),
        ({"server_url": None}, "has no server URL"),
        ({"spec": "/no/such/file.yaml"}, "cannot be read"),
        ({"spec": __file__}, "cannot be read|is not an OpenAPI 3 specification"),
    ],
)
def test_a_specification_that_cannot_become_tools_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        openapi_tools({"spec": write_spec(tmp_path), "server_url": "http://x", **config})


def test_a_path_with_an_undefined_parameter_is_refused(tmp_path: Path) -> None:
    path = write_spec(tmp_path, {**SPEC, "paths": {"/of/{owner}": {"get": {"operationId": "get_it"}}}})
    with pytest.raises(ConfigError, match="its path needs the parameter 'owner', which it does not define"):
        openapi_tools({"spec": path, "server_url": "http://x"})


YAML_SPEC = """
openapi: 3.1.0
servers:
  - url: "{scheme}://127.0.0.1:{port}/v3"
    variables: {scheme: {default: http}, port: {default: "PORT"}}
paths:
  /days/{days}:
    get:
      operationId: days
      parameters:
        - {name: days, in: path, required: true, schema: {type: array, items: {type: integer}}}
        - {name: since, in: query, schema: {type: string, default: 2024-02-29}}
        - {name: kinds, in: query, explode: false, schema: {type: array, items: {type: string}}}
        - {name: all, in: query, schema: {type: boolean}}
        - {name: country, in: query, schema: {type: string, enum: [NO, SE]}}
        - {name: Authorization, in: header, schema: {type: string}}
"""


def test_yaml_and_openapi_features_beyond_json_are_supported(tmp_path: Path) -> None:
    with serving(ECHO) as url:
        (tmp_path / "days.yaml").write_text(YAML_SPEC.replace("PORT", url.rpartition(":")[2]))
        [tool] = openapi_tools({"spec": str(tmp_path / "days.yaml")})
        arguments = {"days": [1, 2], "kinds": ["a", "b"], "all": True}
        [result] = ask({"days": tool}, ToolCall("days", arguments))
    properties = tool.tool_schema["function"]["parameters"]["properties"]
    assert properties["since"] == {"type": "string", "default": "2024-02-29"}
    assert properties["country"]["enum"] == ["NO", "SE"]
    assert "Authorization" not in properties
    path, _, query = json.loads(str(result.response.text))["path"].partition("?")
    assert path == "/v3/days/1%2C2"
    assert set(query.split("&")) == {"kinds=a,b", "all=true"}
