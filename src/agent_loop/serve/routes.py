"""The routes of the OpenAI and Anthropic APIs, in front of whatever completes chat requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic.json_schema import models_json_schema
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agent_loop import __version__
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import AgentLoopError, RequestError, UnsupportedParameter
from agent_loop.serve.chat import chat_completion, stream_chat_completion
from agent_loop.serve.chat_replies import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorResponse,
    ModelCard,
    ModelList,
    ResponseModel,
)
from agent_loop.serve.chat_requests import ChatCompletionRequest, RequestModel
from agent_loop.serve.errors import (
    CLIENT_CLOSED_REQUEST,
    VERSION_HEADER,
    ClientDisconnected,
    error_response_of,
    json_response,
    make_error,
    status_of,
)
from agent_loop.serve.messages_replies import MessageWriter, model_info, model_info_list, token_count
from agent_loop.serve.messages_requests import CountTokensRequest, MessagesRequest, translate_messages
from agent_loop.serve.responses_replies import ResponseWriter
from agent_loop.serve.responses_requests import CallRecord, ResponsesRequest, renamed, translate_response
from agent_loop.serve.sampling import Sampler
from agent_loop.serve.streams import ClientConnection, OpenAIWriter, ReplyWriter, stream_response
from agent_loop.serve.wishes import Wishes, dropped
from agent_loop.trajectory import Incident, IncidentKind

RequestT = TypeVar("RequestT", bound=RequestModel)
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class Completer(Protocol):
    """What completes one HTTP request: the servers behind `agent-loop serve`, or a session of the gateway."""

    @property
    def template(self) -> ChatTemplate:
        """Chat template of the model."""
        ...

    @property
    def calls(self) -> CallRecord:
        """Calls that the model made, for the Responses API."""
        ...

    @property
    def wishes(self) -> Wishes:
        """Parameters that the client may send although they cannot be honoured."""
        ...

    def note(self, incident: Incident) -> None:
        """Record what was lost in reading the request."""
        ...

    def complete(self, chat: ChatCompletionRequest) -> Coroutine[Any, Any, ChatCompletion]:
        """Return the whole completion of a chat request."""
        ...

    def stream(self, chat: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk]:
        """Yield the completion of a chat request while it is sampled."""
        ...

    async def count_tokens(self, chat: ChatCompletionRequest) -> int:
        """Return the number of tokens of a chat request's prompt."""
        ...

    def model_card(self, name: str | None) -> ModelCard:
        """Return the description of a model; without a name, of the one that is served."""
        ...


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """Method and path that an application offers."""

    method: str
    path: str
    handle: Handler
    body: type[RequestModel] | None = None
    kinds: Sequence[str] = ("application/json",)
    """Types of the content of successful responses."""

    @property
    def shown_path(self) -> str:
        return self.path.replace(":path}", "}")

    def route(self) -> Route:
        """Return the route for Starlette."""

        async def endpoint(request: Request) -> Response:
            request.state.route = self.path
            return await self.handle(request)

        return Route(self.path, endpoint, methods=[self.method])


_STREAMED = ("application/json", "text/event-stream")


class ModelApis:
    """Chat completions, Responses, Messages, and descriptions of the model.

    Args:
        open_completer: Returns what completes a request, or raises an error if the client may not send it. Called
            before the body is read.
        stopping: Aborts in-flight requests once it is set.
    """

    def __init__(self, open_completer: Callable[[Request], Completer], *, stopping: asyncio.Event) -> None:
        self._open = open_completer
        self._stopping = stopping

    def routes(self, prefix: str) -> list[ApiRoute]:
        """Return the routes of the APIs, below a prefix."""
        return [
            ApiRoute("POST", f"{prefix}/chat/completions", self._chat, ChatCompletionRequest, _STREAMED),
            ApiRoute("POST", f"{prefix}/responses", self._responses, ResponsesRequest, _STREAMED),
            ApiRoute("POST", f"{prefix}/messages", self._messages, MessagesRequest, _STREAMED),
            ApiRoute("POST", f"{prefix}/messages/count_tokens", self._count_tokens, CountTokensRequest),
            ApiRoute("GET", f"{prefix}/models", self._models),
            ApiRoute("GET", f"{prefix}/models/{{name:path}}", self._model),
        ]

    async def _chat(self, request: Request) -> Response:
        completer = self._open(request)
        body = await _read(ChatCompletionRequest, request, completer)
        return await self._reply(request, completer, body, writer=OpenAIWriter())

    async def _responses(self, request: Request) -> Response:
        completer = self._open(request)
        body = await _read(ResponsesRequest, request, completer)
        try:
            translated = translate_response(body, calls=completer.calls, wishes=completer.wishes.names)
        except UnsupportedParameter as error:
            raise completer.wishes.hinted(error) from None
        for name in translated.tools.dropped:
            completer.note(dropped(name, reason="hosted tools are not available"))
        writer = ResponseWriter(translated, calls=completer.calls)
        try:
            return await self._reply(request, completer, translated.chat, writer=writer)
        except RequestError as error:
            raise renamed(error) from None

    async def _messages(self, request: Request) -> Response:
        completer = self._open(request)
        body = await _read(MessagesRequest, request, completer)
        chat = translate_messages(body, template=completer.template)
        for edit in body.unapplied_edits:
            detail = f"context_management: the edit {edit!r} is not applied"
            completer.note(Incident(IncidentKind.DROPPED_PARAMETER, detail))
        return await self._reply(request, completer, chat, writer=MessageWriter(body))

    async def _count_tokens(self, request: Request) -> Response:
        completer = self._open(request)
        body = await _read(CountTokensRequest, request, completer)
        chat = translate_messages(body, template=completer.template)
        return json_response(token_count(await completer.count_tokens(chat), request=body))

    async def _models(self, request: Request) -> Response:
        card = self._open(request).model_card(None)
        is_anthropic = VERSION_HEADER in request.headers
        return json_response(model_info_list(card) if is_anthropic else ModelList(data=[card]))

    async def _model(self, request: Request) -> Response:
        card = self._open(request).model_card(request.path_params["name"])
        return json_response(model_info(card) if VERSION_HEADER in request.headers else card)

    async def _reply(
        self, request: Request, completer: Completer, chat: ChatCompletionRequest, *, writer: ReplyWriter
    ) -> Response:
        connection = ClientConnection(request.receive, self._stopping)
        if chat.stream:
            return await stream_response(completer.stream(chat), connection=connection, writer=writer)
        return json_response(writer.whole(await connection.run(completer.complete(chat))))


async def _read(model: type[RequestT], request: Request, completer: Completer) -> RequestT:
    body, incidents = completer.wishes.read(model, await read_json(request))
    for incident in incidents:
        completer.note(incident)
    return body


async def read_json(request: Request) -> Any:
    """Return the body of a request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(400, f"the content-type is {kind[:80]!r}; send application/json")
    try:
        return from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def offered(routes: Sequence[ApiRoute]) -> str:
    """Return the methods and paths of routes."""
    return ", ".join(
        f"{route.method} {route.shown_path.removeprefix('/sessions/{session_id}')}" for route in routes
    )


def openapi_route(title: str, routes: Sequence[ApiRoute]) -> ApiRoute:
    """Return the route of the OpenAPI description of other routes."""

    async def describe(request: Request) -> Response:
        return json_response(_description(title, routes))

    return ApiRoute("GET", "/openapi.json", describe)


def _description(title: str, routes: Sequence[ApiRoute]) -> dict[str, Any]:
    bodies = [route.body for route in routes if route.body is not None]
    refs, definitions = models_json_schema(
        [(model, "validation") for model in [*bodies, ErrorResponse]],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        failed: dict[str, Any] = {"content": {"application/json": {}}, "description": "The request failed."}
        succeeded: dict[str, Any] = {
            "content": {kind: {} for kind in route.kinds},
            "description": "The response.",
        }
        operation: dict[str, Any] = {"responses": {"200": succeeded, "4XX": failed, "5XX": failed}}
        if route.body is not None:
            content = {"application/json": {"schema": refs[route.body, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        names = [part[1:-1] for part in route.shown_path.split("/") if part.startswith("{")]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
        paths.setdefault(route.shown_path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


async def chat_response(request: Request, *, template: ChatTemplate, sampler: Sampler) -> Response:
    """Respond to one OpenAI chat request inside another web application.

    Each request has its own session, which ends with the request. Errors become OpenAI error responses with the
    matching status. The completion is aborted if the client disconnects.

    Args:
        request: The HTTP request.
        template: Chat template of the model.
        sampler: A server, or the `sampler` of an `AsyncLLMServerManager`.
    """
    try:
        chat = ChatCompletionRequest.read(await read_json(request)).model_copy(update={"session_id": None})
        connection = ClientConnection(request.receive, asyncio.Event())
        if chat.stream:
            chunks: AsyncGenerator[ResponseModel] = stream_chat_completion(
                chat, template=template, sampler=sampler
            )
            return await stream_response(chunks, connection=connection, writer=OpenAIWriter())
        completion = await connection.run(chat_completion(chat, template=template, sampler=sampler))
    except AgentLoopError as error:
        return json_response(error_response_of(error), status=status_of(error))
    except HTTPException as error:
        status = error.status_code
        return json_response(make_error(str(error.detail), status=status), status=status)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return json_response(completion)
