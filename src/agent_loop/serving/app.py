"""The HTTP application of `agent-loop serve`: routes, errors and API key."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.security import HTTPBearer

from agent_loop import __version__
from agent_loop.serving.background import BackgroundTasks
from agent_loop.serving.completion_routes import CompletionRoutes
from agent_loop.serving.error_formats import write_error
from agent_loop.serving.errors import make_error
from agent_loop.serving.handlers import add_error_handlers
from agent_loop.serving.hosts import MISDIRECTED, HostGuard
from agent_loop.serving.messages_routes import MessagesRoutes
from agent_loop.serving.middleware import BodyLimiter, RequestCounter, StrictRoute
from agent_loop.serving.model_routes import ModelRoutes
from agent_loop.serving.monitoring_routes import MonitoringRoutes
from agent_loop.serving.pool_requests import PoolRequests
from agent_loop.serving.request_ids import RequestIds
from agent_loop.serving.responses_routes import ResponsesRoutes
from agent_loop.serving.route_declarations import OPENAI_ERRORS
from agent_loop.serving.served_model import ServedModel, UnknownModel


def create_app(served: ServedModel) -> FastAPI:
    """Return an ASGI application that serves the OpenAI and Anthropic APIs from a pool of servers."""
    background = BackgroundTasks()
    app = FastAPI(
        title="agent-loop",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: background.running(),
    )
    app.state.has_lifespan = True
    app.state.stopping = asyncio.Event()
    """Aborts in-flight requests once it is set."""
    requests = PoolRequests(served, stopping=app.state.stopping)
    app.include_router(_api_router(requests, background))
    app.include_router(_monitoring_router(requests))
    add_error_handlers(app)
    app.add_exception_handler(UnknownModel, _on_unknown_model)
    app.add_middleware(BodyLimiter)
    app.add_middleware(HostGuard, hosts=served.hosts, refuse=_refuse_host)
    app.add_middleware(RequestCounter, metrics=requests.metrics)
    app.add_middleware(RequestIds)
    return app


def _api_router(requests: PoolRequests, background: BackgroundTasks) -> APIRouter:
    """Return the routes that require the API key."""
    admit = None if requests.served.api_key is None else requests.check_key
    # The security scheme is only for the OpenAPI description. `admit` checks the key before the body is read.
    described = [] if admit is None else [Depends(HTTPBearer(auto_error=False))]
    router = APIRouter(
        prefix="/v1",
        responses=OPENAI_ERRORS,
        dependencies=described,
        route_class=StrictRoute.admitting(admit),
    )
    CompletionRoutes(requests).add_to(router)
    MessagesRoutes(requests).add_to(router)
    ModelRoutes(requests).add_to(router)
    ResponsesRoutes(requests, background=background).add_to(router)
    return router


def _monitoring_router(requests: PoolRequests) -> APIRouter:
    """Return the routes that require no API key."""
    router = APIRouter(responses=OPENAI_ERRORS)
    MonitoringRoutes(requests).add_to(router)
    return router


def _refuse_host(request: Request, message: str) -> Response:
    error = make_error(f"{message}; allow it with --allowed-host", status=MISDIRECTED)
    return write_error(request, error, MISDIRECTED, None)


async def _on_unknown_model(request: Request, error: Exception) -> Response:
    response = make_error(str(error), status=404, param="model", code="model_not_found")
    return write_error(request, response, 404, None)
