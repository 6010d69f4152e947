"""The gateway's HTTP application: the OpenAI and Anthropic endpoints of each session."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, FastAPI, Request, Response

from agent_loop import __version__
from agent_loop.gateway.chat_routes import ChatRoutes
from agent_loop.gateway.gateway import Gateway
from agent_loop.gateway.messages_routes import MessagesRoutes
from agent_loop.gateway.model_routes import ModelRoutes
from agent_loop.gateway.responses_routes import ResponsesRoutes
from agent_loop.gateway.session_requests import SessionRequests
from agent_loop.serving.error_formats import write_error
from agent_loop.serving.errors import make_error
from agent_loop.serving.handlers import add_error_handlers
from agent_loop.serving.hosts import LOCAL_HOSTS, MISDIRECTED, HostGuard
from agent_loop.serving.middleware import BodyLimiter, StrictRoute
from agent_loop.serving.request_ids import RequestIds
from agent_loop.serving.route_declarations import OPENAI_ERRORS


def create_gateway_app(gateway: Gateway) -> FastAPI:
    """Return an ASGI application that serves the sessions of a gateway."""
    app = FastAPI(title="agent-loop gateway", version=__version__, docs_url=None, redoc_url=None)
    app.state.stopping = asyncio.Event()
    """Aborts in-flight requests once it is set."""
    requests = SessionRequests(gateway, stopping=app.state.stopping)
    router = APIRouter(
        prefix="/sessions/{session_id}/v1",
        responses=OPENAI_ERRORS,
        route_class=StrictRoute.admitting(requests.check_key, amend=requests.amend),
    )
    ChatRoutes(requests).add_to(router)
    MessagesRoutes(requests).add_to(router)
    ModelRoutes(requests).add_to(router)
    ResponsesRoutes(requests).add_to(router)
    app.include_router(router)
    add_error_handlers(app, on_refused=requests.note_refusal)
    app.add_middleware(BodyLimiter)
    app.add_middleware(HostGuard, hosts=LOCAL_HOSTS, refuse=_refuse_host)
    app.add_middleware(RequestIds)
    return app


def _refuse_host(request: Request, message: str) -> Response:
    return write_error(request, make_error(message, status=MISDIRECTED), MISDIRECTED, None)
