"""Routes that describe the served model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from agent_loop.completions.response_models import ModelCard
from agent_loop.serving.model_descriptions import VERSION_HEADER, model_list_response, model_response
from agent_loop.serving.pool_requests import PoolRequests
from agent_loop.serving.route_declarations import add_model_routes

VersionHeader = Annotated[str | None, Header(alias=VERSION_HEADER)]


class ModelRoutes:
    """Descriptions of the model, in the format of Anthropic if the client sends its header, and else of OpenAI."""

    def __init__(self, requests: PoolRequests) -> None:
        self._served = requests.served

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of requests that need the API key."""
        add_model_routes(router, list_models=self._models, describe=self._model)

    async def _models(self, request: Request, anthropic_version: VersionHeader = None) -> Response:
        """List the model."""
        return model_list_response(self._card, request)

    async def _model(self, name: str, request: Request, anthropic_version: VersionHeader = None) -> Response:
        """Describe the model."""
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
