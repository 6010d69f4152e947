"""Answers HTTP requests with completions of a pool of servers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Header, Request, Response
from starlette.exceptions import HTTPException

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.requests import SamplingRequest
from agent_loop.completions.response_models import ResponseModel
from agent_loop.completions.sampling import Sampler
from agent_loop.serving.metered_sampler import MeteredSampler
from agent_loop.serving.metrics import Metrics
from agent_loop.serving.scores import ServedCompletionRequest, score_prompts
from agent_loop.serving.served_model import ServedModel
from agent_loop.serving.sessions import SessionTable
from agent_loop.serving.streams import (
    OPENAI_EVENTS,
    ClientConnection,
    EventFormat,
    json_response,
    stream_response,
)

RequestT = TypeVar("RequestT", bound=SamplingRequest, contravariant=True)
ResultT = TypeVar("ResultT", bound=ResponseModel, covariant=True)
SessionHeader = Annotated[str | None, Header(alias="x-session-id", min_length=1, max_length=256)]


class CompleteFunction(Protocol[RequestT, ResultT]):
    """Function that returns a whole completion, such as `chat_completion`."""

    def __call__(
        self, request: RequestT, /, *, template: ChatTemplate, sampler: Sampler, session: str | None
    ) -> Coroutine[Any, Any, ResultT]: ...


class StreamFunction(Protocol[RequestT]):
    """Function that yields a completion in chunks, such as `stream_chat_completion`."""

    def __call__(
        self, request: RequestT, /, *, template: ChatTemplate, sampler: Sampler, session: str | None
    ) -> AsyncGenerator[ResponseModel]: ...


def _unchanged(response: ResponseModel) -> ResponseModel:
    return response


class PoolRequests:
    """Shared by the routes of all APIs.

    Args:
        served: The model and its servers.
        stopping: Aborts in-flight requests once it is set.
    """

    def __init__(self, served: ServedModel, *, stopping: asyncio.Event) -> None:
        self.served = served
        self.metrics = Metrics()
        self._stopping = stopping
        self._sampler = MeteredSampler(
            served.pool.sampler, metrics=self.metrics, max_model_len=served.max_model_len
        )
        self._sessions = SessionTable(self._sampler)

    def check_key(self, request: Request) -> None:
        """Check the API key of a request before its body is read.

        Raises:
            HTTPException: The key is missing or wrong.
        """
        key = self.served.api_key or ""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not secrets.compare_digest(given.encode(), key.encode()):
            raise HTTPException(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY, or x-api-key: KEY",
            )

    async def respond(
        self,
        body: RequestT,
        request: Request,
        session: str | None,
        *,
        complete: CompleteFunction[RequestT, ResultT],
        stream: StreamFunction[RequestT],
        to_response: Callable[[ResultT], ResponseModel] = _unchanged,
        events: EventFormat = OPENAI_EVENTS,
    ) -> Response:
        """Complete a request. Return the completion whole, or as a stream if the request asks for one.

        Args:
            body: The request, translated to a request of the OpenAI API.
            request: The HTTP request.
            session: Value of the header `x-session-id`.
            complete: Returns the whole completion.
            stream: Yields the completion in chunks.
            to_response: Translates the whole completion to the API of the request.
            events: Writes the chunks of a stream as events of the API of the request.

        Raises:
            AgentLoopError: The request cannot be completed.
            ClientDisconnected: The client disconnected.
        """
        self.served.check_name(body.model)
        connection = ClientConnection(request.receive, self._stopping)
        if body.stream:
            return await stream_response(
                self._stream(body, session, stream), connection=connection, events=events
            )
        return json_response(to_response(await connection.run(self.complete(body, session, complete))))

    async def score(self, body: ServedCompletionRequest, request: Request) -> Response:
        """Return the log-probs of the prompts of a request.

        Raises:
            AgentLoopError: The prompts cannot be scored.
            ClientDisconnected: The client disconnected.
        """
        self.served.check_name(body.model)
        scores = score_prompts(
            body,
            template=self.served.template,
            scorer=self.served.pool.scorer,
            max_model_len=self.served.max_model_len,
        )
        scored = await ClientConnection(request.receive, self._stopping).run(scores)
        self.metrics.prompt_tokens.inc(scored.usage.prompt_tokens)
        return json_response(scored)

    async def complete(
        self, body: RequestT, session: str | None, complete: CompleteFunction[RequestT, ResultT]
    ) -> ResultT:
        """Return the whole completion of a request. The arguments are those of `respond`."""
        with self._sessions.use(session or body.session_id) as own_session:
            return await complete(
                body, template=self.served.template, sampler=self._sampler, session=own_session
            )

    async def _stream(
        self, body: RequestT, session: str | None, stream: StreamFunction[RequestT]
    ) -> AsyncGenerator[ResponseModel]:
        with self._sessions.use(session or body.session_id) as own_session:
            chunks = stream(body, template=self.served.template, sampler=self._sampler, session=own_session)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
