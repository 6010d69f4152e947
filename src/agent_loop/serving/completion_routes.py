"""Routes of the OpenAI chat and text completions APIs, and of the list of models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from agent_loop.completions.chat import chat_completion, stream_chat_completion
from agent_loop.completions.requests import ChatCompletionRequest, CompletionRequest
from agent_loop.completions.response_models import ChatCompletion, ModelCard, ModelList, TextCompletion
from agent_loop.completions.text import completion, stream_completion
from agent_loop.errors import RequestError
from agent_loop.serving.pool_requests import STREAMED, PoolRequests, SessionHeader
from agent_loop.serving.streams import json_response


class CompletionRoutes:
    """Chat completions, text completions and models."""

    def __init__(self, requests: PoolRequests) -> None:
        self._requests = requests
        self._served = requests.served

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of requests that need the API key."""
        router.post(
            "/chat/completions",
            name="create_chat_completion",
            response_model=ChatCompletion,
            responses=STREAMED,
        )(self._chat)
        router.post(
            "/completions", name="create_completion", response_model=TextCompletion, responses=STREAMED
        )(self._complete)
        router.get("/models", name="list_models", response_model=ModelList)(self._models)
        router.get("/models/{name:path}", name="describe_model", response_model=ModelCard)(self._model)

    async def _chat(
        self, body: ChatCompletionRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a conversation."""
        if body.tools_in_use and self._served.why_no_tools:
            raise RequestError(f"tools: {self._served.why_no_tools}", param="tools")
        return await self._requests.respond(
            body, request, session, complete=chat_completion, stream=stream_chat_completion
        )

    async def _complete(
        self, body: CompletionRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a text or token ids."""
        return await self._requests.respond(
            body, request, session, complete=completion, stream=stream_completion
        )

    async def _models(self) -> Response:
        """List the model."""
        return json_response(ModelList(data=[self._card]))

    async def _model(self, name: str) -> Response:
        """Describe the model."""
        self._served.check_name(name)
        return json_response(self._card)

    @property
    def _card(self) -> ModelCard:
        served = self._served
        return ModelCard(
            id=served.model,
            created=served.created,
            owned_by="agent-loop",
            max_model_len=served.max_model_len,
        )
