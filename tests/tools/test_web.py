"""Tools that send HTTP requests, described by a URL or by an OpenAPI specification."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent_loop.errors import ConfigError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool
from agent_loop.tools.registry import load_tools
from agent_loop.tools.web import client
from agent_loop.tools.web.http import HttpTool
from agent_loop.tools.web.openapi import openapi_tools
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall
from tests.tools.harness import execute, execute_each, kind_of, serving, tool_schema

WEATHER = tool_schema("weather", "city", city="string", days="integer", tags="array")
NOWHERE = "http://127.0.0.1:9"


async def weather_of(tool: BaseTool, cities: Sequence[str]) -> list[Any]:
    """Ask for the weather of each city in one trajectory."""
    return await execute_each([tool], *(ToolCall("weather", {"city": city}) for city in cities))


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


async def test_the_arguments_of_a_get_fill_the_url_and_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEATHER_TOKEN", "xyzzy")
    with serving(ECHO) as url:
        config = {"url": f"{url}/at/{{city}}", "headers": {"Authorization": "Bearer $WEATHER_TOKEN"}}
        tool = HttpTool(config, WEATHER)
        result = await execute(tool, city="a/../b?c&é", days=3, tags=["x", "y z"])
    said = json.loads(str(result.response.text))
    assert said["method"] == "GET"
    assert said["path"].startswith("/at/a%2F..%2Fb%3Fc%26%C3%A9?")
    assert set(said["path"].partition("?")[2].split("&")) == {"days=3", "tags=x", "tags=y+z"}
    assert said["token"] == "Bearer xyzzy"
    assert (tool.on_replay, tool.retries) == (OnReplay.RECORDED, 2)


async def test_a_post_sends_json_and_returns_the_selected_part() -> None:
    texts: list[str] = []
    with serving(ECHO) as url:
        for select in ("body", "items.1.text", "items.7.text"):
            config = {"method": "POST", "url": f"{url}/at/{{city}}", "query": ["days"], "select": select}
            tool = HttpTool(config, WEATHER)
            texts.append(str((await execute(tool, city="Ulm", days=3, tags=["x"])).response.text))
            assert (tool.on_replay, tool.retries) == (OnReplay.ONCE, 0)
    assert json.loads(texts[0]) == {"tags": ["x"]}
    assert texts[1:] == ["second", "the response has nothing at 'items.7': a list of 2 items"]


async def test_a_value_that_would_change_the_path_is_refused() -> None:
    tool = HttpTool({"url": f"{NOWHERE}/at/{{city}}/secret"}, WEATHER)
    assert kind_of(await execute(tool, city="..")) is IncidentKind.TOOL_ERROR


async def test_errors_of_the_service_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BYTES", 1000)
    asked: list[str] = []
    odd_charsets = {"odd": "nonsense", "latin": "latin-1", "base64": "base64"}

    async def answer(request: web.Request) -> web.Response:
        asked.append(what := request.match_info["city"])
        if what == "large":
            return web.Response(text="x" * 2000)
        if what in odd_charsets:
            body = b"Zm9v" if what == "base64" else b"caf\xe9"
            content_type = f"text/plain; charset={odd_charsets[what]}"
            return web.Response(body=body, headers={"Content-Type": content_type})
        return web.Response(status=int(what), text="no\nsuch  city")

    with serving(web.get("/{city}", answer)) as url:
        tool = HttpTool({"url": f"{url}/{{city}}"}, WEATHER)
        results = await weather_of(tool, ["404", "429", "large", *odd_charsets])
    assert [kind_of(result) for result in results] == [
        IncidentKind.TOOL_ERROR,
        IncidentKind.TOOL_UNAVAILABLE,
        IncidentKind.TOOL_ERROR,
        *[None] * 3,
    ]
    assert results[0].response.text == "the service returned status 404: no such city"
    assert asked.count("429") == 3
    assert [result.response.text for result in results[4:]] == ["café", "Zm9v"]


async def test_a_response_that_is_not_json_is_reported_to_the_model() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text={"deep": "[" * 100_000, "words": "sorry"}[request.match_info["city"]])

    with serving(web.get("/{city}", answer)) as url:
        tool = HttpTool({"url": f"{url}/{{city}}", "select": "0"}, WEATHER)
        results = await weather_of(tool, ["deep", "words"])
    assert [kind_of(result) for result in results] == [IncidentKind.TOOL_ERROR] * 2
    assert results[1].response.text == "the service did not return valid JSON: 'sorry'"


async def test_headers_with_secrets_are_not_sent_to_other_hosts() -> None:
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
        guarded = HttpTool({**config, "headers": {"X-Key": "xyzzy"}}, WEATHER)
        refused, followed = await weather_of(guarded, ["away", "on"])
        assert seen == ["/away", "/on", "/end"]
        elsewhere = await execute(HttpTool(config, WEATHER), city="away")
    assert refused.response.text == "the service redirects to another host, 'localhost'"
    assert followed.response.text == elsewhere.response.text == "there"


async def test_trajectories_do_not_share_cookies() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("Cookie", "none"), headers={"Set-Cookie": "who=me"})

    with serving(web.get("/{city}", answer)) as url:
        tool = HttpTool({"url": f"{url.replace('127.0.0.1', 'localhost')}/{{city}}"}, WEATHER)
        results = await weather_of(tool, "xx")
    assert [result.response.text for result in results] == ["none", "none"]


async def test_a_slow_service_is_unavailable_and_a_post_is_not_retried() -> None:
    asked: list[str] = []

    async def never(request: web.Request) -> web.Response:
        asked.append(request.method)
        await asyncio.sleep(5)
        return web.Response()

    with serving(web.post("/{city}", never)) as url:
        config = {"method": "POST", "url": f"{url}/{{city}}", "request_timeout_s": 0.1}
        result = await execute(HttpTool(config, WEATHER), city="Ulm")
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
        ({"url": "http://x/{city}", "headers": {"X": "$NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE, which is not"),
        ({"url": "http://x/{city}", "methd": "POST"}, "did you mean 'method'"),
    ],
)
def test_a_config_that_does_not_match_the_schema_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpTool(config, WEATHER)


SPEC = """
openapi: 3.0.3
info: {title: Shop, version: "1"}
paths:
  /items/{id}:
    parameters: [{$ref: "#/components/parameters/Id"}]
    get:
      operationId: get_item
      summary: Looks an item up.
      parameters:
        - {name: fields, in: query, schema: {type: array, items: {type: string}, nullable: true}}
        - {name: X-Trace, in: header, schema: {type: string}}
        - {name: session, in: cookie, schema: {type: string}}
    put:
      operationId: put_item
      description: Changes an item.
      requestBody:
        required: true
        content: {application/json: {schema: {$ref: "#/components/schemas/Item"}}}
  /items:
    post:
      description: Adds items.
      requestBody:
        content: {application/json: {schema: {type: array, items: {$ref: "#/components/schemas/Item"}}}}
  /trees:
    post:
      operationId: add_tree
      requestBody:
        content: {application/json: {schema: {$ref: "#/components/schemas/Tree"}}}
components:
  parameters:
    Id:
      name: id
      in: path
      required: true
      description: The item's number.
      schema: {type: integer, minimum: 0, exclusiveMinimum: true}
  schemas:
    Item:
      type: object
      required: [name]
      properties: {name: {type: string, example: pen}, price: {$ref: "#/components/schemas/Price"}}
    Price: {type: number, nullable: true}
    Tree: {type: object, properties: {children: {type: array, items: {$ref: "#/components/schemas/Tree"}}}}
"""


@pytest.fixture
def shop(tmp_path: Path) -> str:
    return write_spec(tmp_path, SPEC)


def write_spec(folder: Path, spec: str) -> str:
    (folder / "spec.yaml").write_text(spec)
    return str(folder / "spec.yaml")


def test_operations_become_tools_with_their_schemas(shop: str) -> None:
    tools = {
        tool.name: tool for tool in openapi_tools({"spec": shop, "server_url": "http://x", "prefix": "shop_"})
    }
    assert list(tools) == ["shop_get_item", "shop_put_item", "shop_post_items", "shop_add_tree"]
    parameters = {name: tool.tool_schema["function"]["parameters"] for name, tool in tools.items()}
    assert tools["shop_get_item"].tool_schema["function"]["description"] == "Looks an item up."
    assert parameters["shop_get_item"] == {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "exclusiveMinimum": 0, "description": "The item's number."},
            "fields": {"type": ["array", "null"], "items": {"type": "string"}},
            "X-Trace": {"type": "string"},
        },
        "required": ["id"],
    }
    assert parameters["shop_put_item"]["properties"]["price"] == {"type": ["number", "null"]}
    assert parameters["shop_put_item"]["required"] == ["id", "name"]
    assert list(parameters["shop_post_items"]["properties"]) == ["body"]
    children = parameters["shop_add_tree"]["properties"]["children"]
    assert children == {"type": "array", "items": {"type": "object"}}
    assert tools["shop_get_item"].on_replay is OnReplay.RECORDED
    assert tools["shop_put_item"].on_replay is OnReplay.ONCE


async def test_operations_are_sent_as_the_specification_defines(shop: str, tmp_path: Path) -> None:
    with serving(ECHO) as url:
        config = f"{{spec: {shop}, server_url: '{url}/v1/', exclude: [add_tree]}}"
        (tmp_path / "tools.yaml").write_text(
            f"tools: [{{class_name: openapi, timeout_s: 7, config: {config}}}]"
        )
        tools = load_tools([], config_path=tmp_path / "tools.yaml")
        *sent, split, zero = await execute_each(
            list(tools.values()),
            ToolCall("get_item", {"id": 7, "fields": ["a", "b"], "X-Trace": "t"}),
            ToolCall("put_item", {"id": 7, "name": "pen", "price": None}),
            ToolCall("post_items", {"body": [{"name": "pen"}]}),
            ToolCall("get_item", {"id": 1, "X-Trace": "a\r\nX-Admin: yes"}),
            ToolCall("get_item", {"id": 0}),
        )
    assert {tool.timeout_s for tool in tools.values()} == {7.0}
    got, put, post = [json.loads(str(result.response.text)) for result in sent]
    assert (got["method"], got["path"], got["trace"]) == ("GET", "/v1/items/7?fields=a&fields=b", "t")
    assert (put["method"], put["path"], put["body"]) == ("PUT", "/v1/items/7", {"name": "pen", "price": None})
    assert (post["method"], post["body"]) == ("POST", [{"name": "pen"}])
    assert kind_of(split) is IncidentKind.TOOL_ERROR
    assert "X-Trace is sent in a header, so it must be one line" in str(split.response.text)
    assert kind_of(zero) is IncidentKind.INVALID_ARGUMENTS


async def test_a_specification_is_fetched_from_its_service() -> None:
    async def describe(request: web.Request) -> web.Response:
        return web.Response(text=SPEC.replace("info:", "servers: [{url: /v2}]\ninfo:"))

    with serving(web.get("/openapi.json", describe), web.get("/v2/{rest:.*}", echo)) as url:
        config = {"spec": f"{url}/openapi.json", "operations": ["get_item"]}
        [tool] = await asyncio.to_thread(openapi_tools, config)
        result = await execute(tool, id=1)
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
    config: dict[str, Any], message: str, shop: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        openapi_tools({"spec": shop, "server_url": "http://x", **config})


def posting(schema: Any, **schemas: Any) -> dict[str, Any]:
    """Return the parts of a specification of one operation whose body has the schema."""
    body = {"content": {"application/json": {"schema": schema}}}
    return {
        "paths": {"/x": {"post": {"operationId": "put_x", "requestBody": body}}},
        "components": {"schemas": schemas},
    }


DOUBLING = {
    f"l{n}": {
        "type": "object",
        "properties": {name: {"$ref": f"#/components/schemas/l{n + 1}"} for name in "ab"},
    }
    for n in range(18)
}
OUTSIDE = r"'put_x' refers to what its document does not contain, .* exclude it"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"paths": {"/of/{owner}": {"get": {"operationId": "get_it"}}}}, "needs the parameter 'owner'"),
        (posting({"$ref": "file:///etc/passwd"}), OUTSIDE),
        (posting({"$ref": "#/components/schemas/Nothing"}), OUTSIDE),
        (
            posting({"$ref": "#/components/schemas/l0"}, **DOUBLING, l18={}),
            "too large for a model to read; exclude it",
        ),
    ],
)
def test_an_operation_that_cannot_be_described_is_refused(
    parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = write_spec(tmp_path, json.dumps({"openapi": "3.1.0", **parts}))
    with pytest.raises(ConfigError, match=message):
        openapi_tools({"spec": spec, "server_url": NOWHERE})


DAYS = """
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


async def test_yaml_and_openapi_features_beyond_json_are_supported(tmp_path: Path) -> None:
    with serving(ECHO) as url:
        [tool] = openapi_tools({"spec": write_spec(tmp_path, DAYS.replace("PORT", url.rpartition(":")[2]))})
        result = await execute(tool, days=[1, 2], kinds=["a", "b"], all=True)
    properties = tool.tool_schema["function"]["parameters"]["properties"]
    assert properties["since"] == {"type": "string", "default": "2024-02-29"}
    assert properties["country"]["enum"] == ["NO", "SE"]
    assert "Authorization" not in properties
    path, _, query = json.loads(str(result.response.text))["path"].partition("?")
    assert path == "/v3/days/1%2C2"
    assert set(query.split("&")) == {"kinds=a,b", "all=true"}
