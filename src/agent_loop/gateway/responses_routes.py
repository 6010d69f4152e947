"""Routes of the OpenAI Responses API."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request, Response

from agent_loop.completions.responses.requests import ResponsesRequest
from agent_loop.completions.responses.translation import PreparedResponse, renamed
from agent_loop.errors import RequestError, UnsupportedParameter
from agent_loop.gateway.responses import build_completion
from agent_loop.gateway.session import Session
from agent_loop.gateway.session_requests import SessionRequests, dropped_parameters, retry_info
from agent_loop.serving.response_records import ResponseRecords
from agent_loop.serving.responses_routes import Limit, Order, refuse_stream
from agent_loop.serving.route_declarations import add_responses_routes
from agent_loop.serving.streams import EventFormat, json_response
from agent_loop.trajectory import Incident, IncidentKind

MAX_CHARACTERS = 8_000_000
"""Maximum size of a session's stored responses. Programs that send whole conversations do not need old ones."""


class ResponsesRoutes:
    """Responses of a session. Each session has its own stored responses."""

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests
        self._records: WeakKeyDictionary[Session, ResponseRecords] = WeakKeyDictionary()

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of sessions."""
        add_responses_routes(
            router,
            create=self._create,
            retrieve=self._retrieve,
            delete=self._delete,
            cancel=self._cancel,
            list_input_items=self._input_items,
        )

    async def _create(self, session_id: str, body: ResponsesRequest, request: Request) -> Response:
        """Create a response."""
        session = self._requests.session(session_id, request)
        records = self._records_of(session)
        try:
            prepared = records.prepare(body, wishes=session.wishes.names)
        except UnsupportedParameter as error:
            hint = f"to ignore it, add {error.param} to accept_as_wish of the loop's entry"
            raise UnsupportedParameter(f"{error}; {hint}", param=error.param) from None
        try:
            return await self._respond(prepared, session, request)
        except RequestError as error:
            raise renamed(error) from None

    async def _respond(self, prepared: PreparedResponse, session: Session, request: Request) -> Response:
        records, body = self._records_of(session), prepared.request
        if body.background:
            lost = [*dropped_parameters(request), *_unmet(prepared)]
            shared = session.submit(prepared.chat, retry=retry_info(request), incidents=lost)
            complete = partial(build_completion, prepared.chat, shared)
            return json_response(records.start(prepared, complete=complete, start_task=session.start_task))
        writer = records.writer(prepared)
        return await self._requests.respond(
            prepared.chat,
            request,
            session,
            incidents=_unmet(prepared),
            to_response=writer.write_whole,
            events=EventFormat(write=writer.write, write_error=writer.write_error, end=writer.end),
        )

    async def _retrieve(
        self, session_id: str, response_id: str, request: Request, stream: bool = False
    ) -> Response:
        """Return a stored response."""
        refuse_stream(stream)
        return json_response(self._records_at(session_id, request).retrieve(response_id))

    async def _delete(self, session_id: str, response_id: str, request: Request) -> Response:
        """Remove a stored response."""
        return json_response(await self._records_at(session_id, request).delete(response_id))

    async def _cancel(self, session_id: str, response_id: str, request: Request) -> Response:
        """Abort a response in the background."""
        return json_response(await self._records_at(session_id, request).cancel(response_id))

    async def _input_items(
        self,
        session_id: str,
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Limit = 20,
        order: Order = "desc",
    ) -> Response:
        """List the items of the conversation before a response."""
        records = self._records_at(session_id, request)
        return json_response(records.input_items(response_id, after=after, limit=limit, order=order))

    def _records_at(self, session_id: str, request: Request) -> ResponseRecords:
        return self._records_of(self._requests.session(session_id, request))

    def _records_of(self, session: Session) -> ResponseRecords:
        return self._records.setdefault(session, ResponseRecords(max_characters=MAX_CHARACTERS))


def _unmet(prepared: PreparedResponse) -> list[Incident]:
    return [Incident(IncidentKind.DROPPED_PARAMETER, detail) for detail in prepared.unmet]
