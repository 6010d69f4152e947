"""Routes of the Anthropic Messages API."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from agent_loop.completions.anthropic.errors import messages_error_event
from agent_loop.completions.anthropic.events import EventWriter
from agent_loop.completions.anthropic.requests import MessagesRequest
from agent_loop.completions.anthropic.translation import to_chat_request, to_message
from agent_loop.gateway.session_requests import SessionRequests
from agent_loop.serving.streams import EventFormat


class MessagesRoutes:
    """Messages of a session."""

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of sessions."""
        router.post("/messages", name="create_message")(self._messages)

    async def _messages(self, session_id: str, body: MessagesRequest, request: Request) -> Response:
        """Complete a conversation of the Anthropic Messages API."""
        session = self._requests.session(session_id, request)
        writer = EventWriter(shows_thinking=body.shows_thinking)
        return await self._requests.respond(
            to_chat_request(body),
            request,
            session,
            to_response=partial(to_message, shows_thinking=body.shows_thinking),
            events=EventFormat(write=writer.write, write_error=messages_error_event, end=writer.end),
        )
