"""Routes of the OpenAI chat completions API, and of the list of models."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from agent_loop.completions.response_models import ModelCard, ModelList
from agent_loop.gateway.requests import SessionChatRequest
from agent_loop.gateway.session_requests import SessionRequests
from agent_loop.serving.streams import json_response

MODEL_NAME = "agent-loop"
"""Model name that `/v1/models` lists. Requests may name any model; the model in training answers."""


class ChatRoutes:
    """Chat completions of a session."""

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests
        self._created = int(time.time())

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of sessions."""
        router.post("/chat/completions", name="create_chat_completion")(self._chat)
        router.get("/models", name="list_models")(self._models)

    async def _chat(self, session_id: str, body: SessionChatRequest, request: Request) -> Response:
        """Complete a conversation."""
        return await self._requests.respond(body, request, self._requests.session(session_id, request))

    async def _models(self, session_id: str, request: Request) -> Response:
        """List the model."""
        self._requests.session(session_id, request)
        card = ModelCard(id=MODEL_NAME, created=self._created, owned_by="agent-loop")
        return json_response(ModelList(data=[card]))
