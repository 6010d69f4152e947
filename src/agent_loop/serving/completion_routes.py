"""Routes of the OpenAI chat and text completions APIs."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from agent_loop.completions.chat import chat_completion, stream_chat_completion
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.response_models import TextCompletion
from agent_loop.completions.text import completion, stream_completion
from agent_loop.serving.pool_requests import PoolRequests, SessionHeader
from agent_loop.serving.route_declarations import STREAMED, add_chat_route
from agent_loop.serving.scores import ScoredPrompts, ServedCompletionRequest


class CompletionRoutes:
    """Chat completions and text completions."""

    def __init__(self, requests: PoolRequests) -> None:
        self._requests = requests
        self._served = requests.served

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of requests that need the API key."""
        add_chat_route(router, create=self._chat)
        router.post(
            "/completions",
            name="create_completion",
            response_model=TextCompletion | ScoredPrompts,
            responses=STREAMED,
        )(self._complete)

    async def _chat(
        self, body: ChatCompletionRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a conversation."""
        self._served.check_tools(body)
        return await self._requests.respond(
            body, request, session, complete=chat_completion, stream=stream_chat_completion
        )

    async def _complete(
        self, body: ServedCompletionRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a text or token ids, or score them."""
        if body.is_scored:
            return await self._requests.score(body, request)
        return await self._requests.respond(
            body, request, session, complete=completion, stream=stream_completion
        )
