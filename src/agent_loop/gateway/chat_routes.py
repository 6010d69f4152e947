"""Routes of the OpenAI chat completions API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from agent_loop.completions.response_models import ChatCompletion
from agent_loop.gateway.requests import SessionChatRequest
from agent_loop.gateway.session_requests import SessionRequests
from agent_loop.serving.described_responses import STREAMED


class ChatRoutes:
    """Chat completions of a session."""

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of sessions."""
        router.post(
            "/chat/completions",
            name="create_chat_completion",
            response_model=ChatCompletion,
            responses=STREAMED,
        )(self._chat)

    async def _chat(self, session_id: str, body: SessionChatRequest, request: Request) -> Response:
        """Complete a conversation."""
        return await self._requests.respond(body, request, self._requests.session(session_id, request))
