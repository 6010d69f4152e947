"""Descriptions of models in the format of the API that the client uses."""

from __future__ import annotations

from fastapi import Request, Response

from agent_loop.completions.anthropic.messages import to_model_info, to_model_list
from agent_loop.completions.response_models import ModelCard, ModelList
from agent_loop.serving.streams import json_response

VERSION_HEADER = "anthropic-version"
"""Header that clients of Anthropic send."""


def model_list_response(card: ModelCard, request: Request) -> Response:
    """Return a list with one model."""
    is_anthropic = VERSION_HEADER in request.headers
    return json_response(to_model_list(card) if is_anthropic else ModelList(data=[card]))


def model_response(card: ModelCard, request: Request) -> Response:
    """Return the description of a model."""
    return json_response(to_model_info(card) if VERSION_HEADER in request.headers else card)
