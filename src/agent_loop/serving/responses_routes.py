"""Routes of the OpenAI Responses API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from agent_loop.completions.chat import chat_completion, stream_chat_completion
from agent_loop.completions.responses.requests import ResponsesRequest
from agent_loop.errors import RequestError
from agent_loop.serving.background import BackgroundTasks
from agent_loop.serving.pool_requests import PoolRequests, SessionHeader
from agent_loop.serving.response_records import ResponseRecords
from agent_loop.serving.route_declarations import add_responses_routes
from agent_loop.serving.streams import EventFormat, json_response

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


class ResponsesRoutes:
    """Responses of the pool.

    Args:
        requests: Completes chat requests.
        background: Runs responses in the background.
    """

    def __init__(self, requests: PoolRequests, *, background: BackgroundTasks) -> None:
        self._requests = requests
        self._background = background
        self._records = ResponseRecords()

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of requests that need the API key."""
        add_responses_routes(
            router,
            create=self._create,
            retrieve=self._retrieve,
            delete=self._delete,
            cancel=self._cancel,
            list_input_items=self._input_items,
        )

    async def _create(
        self, body: ResponsesRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Create a response."""
        served = self._requests.served
        prepared = self._records.prepare(body)
        if prepared.chat.tools_in_use and served.why_no_tools:
            raise RequestError(f"tools: {served.why_no_tools}", param="tools")
        if body.background:
            served.check_name(body.model)
            complete = partial(self._requests.complete, prepared.chat, session, chat_completion)
            return json_response(
                self._records.start(prepared, complete=complete, start_task=self._background.start)
            )
        writer = self._records.writer(prepared)
        return await self._requests.respond(
            prepared.chat,
            request,
            session,
            complete=chat_completion,
            stream=stream_chat_completion,
            to_response=writer.write_whole,
            events=EventFormat(write=writer.write, write_error=writer.write_error, end=writer.end),
        )

    async def _retrieve(self, response_id: str, stream: bool = False) -> Response:
        """Return a stored response."""
        refuse_stream(stream)
        return json_response(self._records.retrieve(response_id))

    async def _delete(self, response_id: str) -> Response:
        """Remove a stored response."""
        return json_response(await self._records.delete(response_id))

    async def _cancel(self, response_id: str) -> Response:
        """Abort a response in the background."""
        return json_response(await self._records.cancel(response_id))

    async def _input_items(
        self, response_id: str, after: str | None = None, limit: Limit = 20, order: Order = "desc"
    ) -> Response:
        """List the items of the conversation before a response."""
        return json_response(self._records.input_items(response_id, after=after, limit=limit, order=order))


def refuse_stream(stream: bool) -> None:
    """Refuse to stream a stored response.

    Raises:
        RequestError: A stream is wanted.
    """
    if stream:
        raise RequestError(
            "stream is not supported for stored responses; leave it out, and retrieve the response again until its "
            "status is completed",
            param="stream",
        )
