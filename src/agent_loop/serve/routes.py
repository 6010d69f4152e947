"""The application that speaks the OpenAI and Anthropic APIs, in front of whatever completes chat requests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import AgentLoopError
from agent_loop.serve.chat import sample_chat
from agent_loop.serve.chat_replies import ChatWriter, ReplyWriter
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.completions import ReplyChunk, Sampler
from agent_loop.serve.errors import ErrorReply, status_of
from agent_loop.serve.fields import RequestModel
from agent_loop.serve.messages_replies import MessageWriter, model_info, model_info_list, token_count
from agent_loop.serve.messages_requests import CountTokensRequest, MessagesRequest, translate_messages
from agent_loop.serve.middleware import MISDIRECTED, HostGuard, RequestObserver
from agent_loop.serve.responses_replies import ResponseWriter
from agent_loop.serve.responses_requests import CallRecord, ResponsesRequest, translate_response
from agent_loop.serve.streams import ClientConnection, ClientDisconnected, json_response, reply
from agent_loop.serve.wishes import Wishes
from agent_loop.trajectory import Incident, IncidentKind

RequestT = TypeVar("RequestT", bound=RequestModel)
VERSION_HEADER = "anthropic-version"
"""Header that clients of Anthropic send."""
MAX_BODY_BYTES = 32 * 2**20
"""Maximum size of a request body. A long conversation with images fits."""
BODY_TIMEOUT_S = 60.0
"""Time that a client has to send the body of a request."""
CLIENT_CLOSED_REQUEST = 499
"""Status under which requests are counted whose client disconnected before the response."""
_CODES = {401: "invalid_api_key", 404: "not_found", 413: "body_too_large"}
_UNKNOWN_PATH = ("Not Found", "Method Not Allowed")
"""Details of errors that the router raises, and not a route."""


@dataclass(frozen=True, slots=True)
class Completer:
    """Pool of servers, or recording session, that completes one HTTP request."""

    template: ChatTemplate
    calls: CallRecord
    """Calls that the model made, for the Responses API."""
    sample: Callable[[ChatCompletionRequest], AsyncGenerator[ReplyChunk]]
    """Yields the completions of a chat request as they are sampled."""
    count_tokens: Callable[[ChatCompletionRequest], Awaitable[int]]
    """Returns the number of tokens of a chat request's prompt."""
    model_card: Callable[[str | None], Mapping[str, Any]]
    """Returns the description of a model; without a name, of the one that is served."""
    wishes: Wishes
    """Parameters that the client may send although they cannot be honoured."""
    incidents: list[Incident] = field(default_factory=list[Incident])
    """Incidents of reading the request."""


def model_app(
    open_completer: Callable[[Request], Completer],
    *,
    hosts: Iterable[str] | None,
    more: Callable[[asyncio.Event], Sequence[Route]] = lambda _: (),
    observe: Callable[[str, int, float], None] | None = None,
    on_refused: Callable[[AgentLoopError], None] | None = None,
) -> Starlette:
    """Return an ASGI application with chat completions, Responses, Messages, and descriptions of the model.

    Args:
        open_completer: Returns what completes a request, or raises an error if the client may not send it. Called
            before the body is read.
        hosts: Host names that requests may use; None allows any.
        more: Returns further routes. Their handlers abort in-flight requests once the event is set.
        observe: See `RequestObserver`.
        on_refused: Called with the error of each request that is refused with status 400.
    """
    stopping = asyncio.Event()
    apis = _ModelApis(open_completer, stopping)
    routes = [
        route("POST", "/v1/chat/completions", apis.chat),
        route("POST", "/v1/responses", apis.responses),
        route("POST", "/v1/messages", apis.messages),
        route("POST", "/v1/messages/count_tokens", apis.count_tokens),
        route("GET", "/v1/models", apis.models),
        route("GET", "/v1/models/{name:path}", apis.model),
        *more(stopping),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers=_exception_handlers(routes, on_refused),
        middleware=[
            Middleware(RequestObserver, observe=observe),
            Middleware(HostGuard, hosts=hosts, refuse=_refuse_host),
        ],
    )
    app.state.stopping = stopping
    return app


def model_card(name: str, *, created: int, max_model_len: int | None = None) -> Mapping[str, Any]:
    """Return the description of a model in OpenAI's format."""
    card = {"id": name, "object": "model", "created": created, "owned_by": "agent-loop"}
    return card if max_model_len is None else {**card, "max_model_len": max_model_len}


def route(method: str, path: str, handle: Callable[[Request], Awaitable[Response]]) -> Route:
    """Return a route whose requests are measured under its path."""

    async def endpoint(request: Request) -> Response:
        request.state.route = path
        return await handle(request)

    return Route(path, endpoint, methods=[method])


@dataclass(frozen=True, slots=True)
class _ModelApis:
    """Handlers of the routes."""

    open: Callable[[Request], Completer]
    stopping: asyncio.Event

    async def chat(self, request: Request) -> Response:
        completer = self.open(request)
        body = await _read(ChatCompletionRequest, request, completer)
        return await self._reply(request, completer, body, writer=ChatWriter(body, completer.template))

    async def responses(self, request: Request) -> Response:
        completer = self.open(request)
        body = await _read(ResponsesRequest, request, completer)
        with ResponsesRequest.naming_errors():
            translated = translate_response(body, calls=completer.calls)
            writer = ResponseWriter(translated, template=completer.template, calls=completer.calls)
            return await self._reply(request, completer, translated.chat, writer=writer)

    async def messages(self, request: Request) -> Response:
        completer = self.open(request)
        body = await _read(MessagesRequest, request, completer)
        for edit in body.context_management.unapplied if body.context_management else ():
            detail = f"context_management: the edit {edit!r} is not applied"
            completer.incidents.append(Incident(IncidentKind.DROPPED_PARAMETER, detail))
        with MessagesRequest.naming_errors():
            chat = translate_messages(body, template=completer.template)
            return await self._reply(request, completer, chat, writer=MessageWriter(body))

    async def count_tokens(self, request: Request) -> Response:
        completer = self.open(request)
        body = await _read(CountTokensRequest, request, completer)
        with MessagesRequest.naming_errors():
            chat = translate_messages(body, template=completer.template)
            return json_response(token_count(await completer.count_tokens(chat), request=body))

    async def models(self, request: Request) -> Response:
        card = self.open(request).model_card(None)
        is_anthropic = VERSION_HEADER in request.headers
        return json_response(model_info_list(card) if is_anthropic else {"object": "list", "data": [card]})

    async def model(self, request: Request) -> Response:
        card = self.open(request).model_card(request.path_params["name"])
        return json_response(model_info(card) if VERSION_HEADER in request.headers else card)

    async def _reply(
        self, request: Request, completer: Completer, chat: ChatCompletionRequest, *, writer: ReplyWriter
    ) -> Response:
        connection = ClientConnection(request.receive, self.stopping)
        return await reply(
            completer.sample(chat), connection=connection, writer=writer, is_streamed=chat.stream
        )


async def _read(model: type[RequestT], request: Request, completer: Completer) -> RequestT:
    body, incidents = completer.wishes.read(model, await read_json(request))
    completer.incidents.extend(incidents)
    return body


async def read_json(request: Request) -> Any:
    """Return the body of a request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(400, f"the content-type is {kind[:80]!r}; send application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    message = f"the body has more than {MAX_BODY_BYTES} bytes; send a smaller request"
                    raise HTTPException(413, message)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
        raise HTTPException(408, message) from None
    try:
        return from_json(bytes(body), allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error


def check_api_key(request: Request, api_key: str) -> None:
    """Refuse a request that does not carry this API key."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    if not secrets.compare_digest(given.encode(), api_key.encode()):
        raise HTTPException(
            401,
            "the API key is missing or wrong; send the header Authorization: Bearer KEY, or x-api-key: KEY",
        )


def _exception_handlers(
    routes: Sequence[Route], on_refused: Callable[[AgentLoopError], None] | None
) -> Mapping[Any, Any]:
    """Return the handlers that turn every exception into an error response."""
    offered = ", ".join(
        f"{next(iter(each.methods - {'HEAD'}))} {each.path.replace(':path}', '}')}"
        for each in routes
        if each.methods
    )

    async def on_error(request: Request, error: AgentLoopError) -> Response:
        if on_refused is not None and status_of(error) == HTTPStatus.BAD_REQUEST:
            on_refused(error)
        return _error_response(request, ErrorReply.of(error))

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if message in _UNKNOWN_PATH:
            message = f"there is no {request.method} {request.url.path}; offered are {offered}"
        failure = ErrorReply(message, error.status_code, code=_CODES.get(error.status_code))
        response = _error_response(request, failure)
        response.headers.update(error.headers or {})
        return response

    async def on_client_disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def on_bug(request: Request, error: Exception) -> Response:
        message = f"internal error: {type(error).__name__}; the server's log has the traceback"
        return _error_response(request, ErrorReply(message, 500))

    return {
        AgentLoopError: on_error,
        HTTPException: on_http_error,
        ClientDisconnected: on_client_disconnected,
        ClientDisconnect: on_client_disconnected,
        Exception: on_bug,
    }


def _error_response(request: Request, error: ErrorReply) -> Response:
    path = request.url.path
    if "/v1/messages" in path or (VERSION_HEADER in request.headers and "/v1/models" in path):
        request_id = getattr(request.state, "request_id", None)
        body = {"type": "error", "error": error.as_messages_detail(), "request_id": request_id}
        return json_response(body, status=error.status)
    return json_response(error.as_openai(), status=error.status)


def _refuse_host(request: Request, message: str) -> Response:
    return _error_response(request, ErrorReply(f"{message}; allow it with --allowed-host", MISDIRECTED))


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
        return await reply(
            sample_chat(chat, template=template, sampler=sampler),
            connection=ClientConnection(request.receive, asyncio.Event()),
            writer=ChatWriter(chat, template),
            is_streamed=chat.stream,
        )
    except AgentLoopError as error:
        failure = ErrorReply.of(error)
    except HTTPException as error:
        failure = ErrorReply(str(error.detail), error.status_code)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return json_response(failure.as_openai(), status=failure.status)
