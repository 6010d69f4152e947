"""Routes that describe the model in training."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from agent_loop.completions.response_models import ModelCard
from agent_loop.gateway.session_requests import SessionRequests
from agent_loop.serving.model_descriptions import model_list_response, model_response
from agent_loop.serving.route_declarations import add_model_routes

MODEL_NAME = "agent-loop"
"""Model name that `/v1/models` lists. Requests may name any model; the model in training answers."""


class ModelRoutes:
    """Descriptions of the model, in the format of OpenAI or Anthropic."""

    def __init__(self, requests: SessionRequests) -> None:
        self._requests = requests
        self._created = int(time.time())

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of sessions."""
        add_model_routes(router, list_models=self._models, describe=self._model)

    async def _models(self, session_id: str, request: Request) -> Response:
        """List the model."""
        return model_list_response(self._card(MODEL_NAME, session_id, request), request)

    async def _model(self, session_id: str, name: str, request: Request) -> Response:
        """Describe the model under any name."""
        return model_response(self._card(name, session_id, request), request)

    def _card(self, name: str, session_id: str, request: Request) -> ModelCard:
        self._requests.session(session_id, request)
        return ModelCard(id=name, created=self._created, owned_by="agent-loop")
