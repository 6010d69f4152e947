"""Routes of the OpenAI chat and text completions APIs, and of the list of models."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from agent_loop.completions.anthropic.response_models import ModelInfo, ModelInfoList
from agent_loop.completions.chat import chat_completion, stream_chat_completion
from agent_loop.completions.requests import ChatCompletionRequest, CompletionRequest
from agent_loop.completions.response_models import ChatCompletion, ModelCard, ModelList, TextCompletion
from agent_loop.completions.text import completion, stream_completion
from agent_loop.serving.model_descriptions import VERSION_HEADER, model_list_response, model_response
from agent_loop.serving.pool_requests import STREAMED, PoolRequests, SessionHeader

VersionHeader = Annotated[str | None, Header(alias=VERSION_HEADER)]


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
        router.get("/models", name="list_models", response_model=ModelList | ModelInfoList)(self._models)
        router.get("/models/{name:path}", name="describe_model", response_model=ModelCard | ModelInfo)(
            self._model
        )

    async def _chat(
        self, body: ChatCompletionRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a conversation."""
        self._served.check_tools(body)
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

    async def _models(self, request: Request, anthropic_version: VersionHeader = None) -> Response:
        """List the model, in the format of Anthropic if the client sends the header."""
        return model_list_response(self._card, request)

    async def _model(self, name: str, request: Request, anthropic_version: VersionHeader = None) -> Response:
        """Describe the model, in the format of Anthropic if the client sends the header."""
        self._served.check_name(name)
        return model_response(self._card, request)

    @property
    def _card(self) -> ModelCard:
        served = self._served
        return ModelCard(
            id=served.model,
            created=served.created,
            owned_by="agent-loop",
            max_model_len=served.max_model_len,
        )
