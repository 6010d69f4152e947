"""Routes of the OpenAI chat completions API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from agent_loop.gateway.requests import SessionChatRequest
from agent_loop.gateway.session_requests import SessionRequests
from agent_loop.serving.route_declarations import add_chat_route


class ChatRoutes:
    """Chat completions of a session."""

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of sessions."""
        add_chat_route(router, create=self._chat)

    async def _chat(self, session_id: str, body: SessionChatRequest, request: Request) -> Response:
        """Complete a conversation."""
        return await self._requests.respond(body, request, self._requests.session(session_id, request))
