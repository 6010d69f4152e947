"""Finds the session of an HTTP request, and answers the request with a completion."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from agent_loop.completions.fields import RequestModel
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_models import ChatCompletion, ResponseModel
from agent_loop.errors import AgentLoopError
from agent_loop.gateway.gateway import Gateway
from agent_loop.gateway.responses import build_completion, stream_chunks
from agent_loop.gateway.retries import RetryInfo
from agent_loop.gateway.session import Session
from agent_loop.serving.streams import (
    OPENAI_EVENTS,
    ClientConnection,
    EventFormat,
    json_response,
    stream_response,
)
from agent_loop.trajectory import Incident


def _unchanged(completion: ChatCompletion) -> ResponseModel:
    return completion


class SessionRequests:
    """Shared by the routes of all APIs.

    Args:
        gateway: The open sessions.
        stopping: Aborts in-flight requests once it is set.
    """

    def __init__(self, gateway: Gateway, *, stopping: asyncio.Event) -> None:
        self._gateway = gateway
        self._stopping = stopping

    def session(self, session_id: str, request: Request) -> Session:
        """Return the session of a request.

        Raises:
            HTTPException: The session is unknown or closed, or the request lacks the session's key.
        """
        api_key = request.headers.get("x-api-key")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return self._gateway.get(session_id, key=token if scheme.lower() == "bearer" else api_key)

    def check_key(self, request: Request) -> None:
        """Check the key of a request before its body is read. Same errors as `session`."""
        self.session(request.path_params["session_id"], request)

    def amend(self, request: Request, model: type[RequestModel], body: Any) -> Any:
        """Return the body of a request without the parameters that its program may send as wishes.

        The incidents are kept with the request, for `dropped_parameters`.

        Raises:
            RequestError: The body is not valid without these parameters either.
        """
        session = self.session(request.path_params["session_id"], request)
        amended, request.state.incidents = session.wishes.amended(model, body)
        return amended

    def note_refusal(self, request: Request, error: AgentLoopError) -> None:
        """Record a refused request as an incident of its session, if the session is open."""
        with suppress(HTTPException):
            self.session(request.path_params["session_id"], request).note_failure(error)

    async def respond(
        self,
        chat: ChatCompletionRequest,
        request: Request,
        session: Session,
        *,
        incidents: Sequence[Incident] = (),
        trusts_call_ids: bool = False,
        to_response: Callable[[ChatCompletion], ResponseModel] = _unchanged,
        events: EventFormat = OPENAI_EVENTS,
    ) -> Response:
        """Submit a chat request to a session. Return its completion whole, or as a stream if the request asks for one.

        Args:
            chat: The request, translated to a chat request.
            request: The HTTP request.
            session: The session of the request.
            incidents: What was lost in the translation.
            trusts_call_ids: See `Session.submit`.
            to_response: Translates the whole completion to the API of the request.
            events: Writes the chunks of a stream as events of the API of the request.

        Raises:
            AgentLoopError: The request cannot be completed.
            ClientDisconnected: The client disconnected.
        """
        lost = [*dropped_parameters(request), *incidents]
        shared = session.submit(
            chat, retry=retry_info(request), incidents=lost, trusts_call_ids=trusts_call_ids
        )
        connection = ClientConnection(request.receive, self._stopping)
        if chat.stream:
            return await stream_response(stream_chunks(chat, shared), connection=connection, events=events)
        return json_response(to_response(await connection.run(build_completion(chat, shared))))


def dropped_parameters(request: Request) -> Sequence[Incident]:
    """Return an incident for each parameter that was dropped from the body of a request."""
    return getattr(request.state, "incidents", ())


def retry_info(request: Request) -> RetryInfo:
    """Return whether a request is a retry."""
    num_retries = 0
    with suppress(ValueError):
        num_retries = int(request.headers.get("x-stainless-retry-count", "0"))
    return RetryInfo(num_retries=num_retries, idempotency_key=request.headers.get("idempotency-key"))
