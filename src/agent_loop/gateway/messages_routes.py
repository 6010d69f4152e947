"""Routes of the Anthropic Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from agent_loop.completions.anthropic.errors import messages_error_event
from agent_loop.completions.anthropic.events import EventWriter
from agent_loop.completions.anthropic.messages import to_message, to_token_count
from agent_loop.completions.anthropic.requests import CountTokensRequest, MessagesRequest
from agent_loop.completions.anthropic.translation import to_chat_request
from agent_loop.gateway.session_requests import SessionRequests
from agent_loop.serving.route_declarations import add_messages_routes
from agent_loop.serving.streams import EventFormat, json_response
from agent_loop.trajectory import Incident, IncidentKind


class MessagesRoutes:
    """Messages of a session."""

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of sessions."""
        add_messages_routes(router, create=self._messages, count_tokens=self._count_tokens)

    async def _messages(self, session_id: str, body: MessagesRequest, request: Request) -> Response:
        """Complete a conversation of the Anthropic Messages API."""
        session = self._requests.session(session_id, request)
        writer = EventWriter(body)
        return await self._requests.respond(
            to_chat_request(body, template=session.template),
            request,
            session,
            incidents=_unapplied(body.unapplied_edits),
            trusts_call_ids=rewrites_calls(request),
            to_response=partial(to_message, request=body),
            events=EventFormat(write=writer.write, write_error=messages_error_event, end=writer.end),
        )

    async def _count_tokens(self, session_id: str, body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation's prompt."""
        session = self._requests.session(session_id, request)
        num_tokens = await session.count_tokens(
            to_chat_request(body, template=session.template), trusts_call_ids=rewrites_calls(request)
        )
        return json_response(to_token_count(num_tokens, request=body))


def rewrites_calls(request: Request) -> bool:
    """Return whether a request comes from Claude Code, which changes calls in its record of the conversation.

    It fills in defaults of arguments, and removes white space at the ends of lines and `cd` to its own folder.
    """
    return request.headers.get("user-agent", "").startswith("claude-cli/")


def _unapplied(edits: Sequence[str]) -> list[Incident]:
    return [
        Incident(IncidentKind.DROPPED_PARAMETER, f"context_management: the edit {edit!r} is not applied")
        for edit in edits
    ]
