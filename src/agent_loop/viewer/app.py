"""HTTP applications of the viewer. They never change a run and load nothing from other hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_loop.serve.middleware import MISDIRECTED, HostGuard
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training.evaluation.summary import SUMMARY_FILE
from agent_loop.viewer.collection import RunCollection, metric_names, seed_curves
from agent_loop.viewer.evaluations import Evaluations
from agent_loop.viewer.forks import Forks
from agent_loop.viewer.packets import encode_json
from agent_loop.viewer.pages import (
    FIRST_PAGE,
    RUNS_PAGE,
    endpoint,
    first_page,
    media_type,
    static_files,
)
from agent_loop.viewer.source import RunSource

SubjectT = TypeVar("SubjectT")
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_viewer_app(
    source: RunSource, *, hosts: Iterable[str] | None, forks: Forks | None = None
) -> Starlette:
    """Return an ASGI application that shows a run.

    Args:
        source: Data of the run.
        hosts: Host names that requests may use, so that pages of other sites cannot reach the viewer. None allows all.
        forks: What-if forks that the page may start; None is no forks.
    """
    forks = forks or Forks(source, server=None, host="")
    evaluations = Evaluations(lambda: {"": source.path})
    routes = [
        *run_routes(lambda _: source, lambda _: evaluations),
        Route("/api/what-if", forks.state),
        Route("/api/fork", forks.fork, methods=["POST"]),
    ]
    return finished_app(routes, hosts=hosts)


def run_routes(
    source_of: Callable[[Request], RunSource],
    evaluations_of: Callable[[Request], Evaluations],
    *,
    prefix: str = "",
    up: str = "",
) -> list[Route]:
    """Return the routes of the page of a run.

    Args:
        source_of: Returns the data of the run that a request names.
        evaluations_of: Returns the evaluations of that run.
        prefix: Start of the paths.
        up: Address of the page of all runs; empty if there is none.
    """

    def page(request: Request) -> Response:
        folder = source_of(request).folder
        is_evaluation = (folder / SUMMARY_FILE).is_file() and not (folder / METRICS_FILE).exists()
        text = first_page(home="evaluations" if is_evaluation else "", up=up)
        return Response(text, media_type=media_type(FIRST_PAGE))

    return [
        Route(f"{prefix}/", endpoint(page)),
        Route(f"{prefix}/static/{{name}}", static_file),
        *api_routes(HANDLERS, source_of, prefix=prefix),
        *api_routes(EVALUATION_HANDLERS, evaluations_of, prefix=prefix),
    ]


def api_routes(
    handlers: Mapping[str, Callable[[SubjectT, Request], Any]],
    subject_of: Callable[[Request], SubjectT],
    *,
    prefix: str = "",
) -> list[Route]:
    """Return a route for each handler, which gets what a request is about."""

    def reader(handler: Callable[[SubjectT, Request], Any]) -> Callable[[Request], Any]:
        return lambda request: handler(subject_of(request), request)

    return [Route(f"{prefix}/api/{name}", endpoint(reader(handler))) for name, handler in handlers.items()]


def finished_app(routes: Sequence[Route], *, hosts: Iterable[str] | None) -> Starlette:
    """Return an application with these routes, that rejects requests under other host names."""
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(HeadersMiddleware),
            Middleware(HostGuard, hosts=hosts, refuse=lambda _, message: _error(message, status=MISDIRECTED)),
        ],
        exception_handlers={HTTPException: _on_http_error},
    )
    app.state.stopping = asyncio.Event()
    return app


class HeadersMiddleware:
    """Middleware that adds `HEADERS` to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def static_file(request: Request) -> Response:
    name = request.path_params["name"]
    text = static_files().get(name)
    if text is None:
        raise HTTPException(404, "there is no such file")
    return Response(text, media_type=media_type(name))


def _given(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _numbers(request: Request, name: str) -> list[int]:
    return [int(part) for part in _given(request, name).split(",")]


def _step(request: Request) -> dict[str, Any]:
    return {"split": _given(request, "split"), "step": int(_given(request, "step"))}


HANDLERS: dict[str, Callable[[RunSource, Request], Any]] = {
    "state": lambda source, _: source.state(),
    "config": lambda source, _: source.config(),
    "metrics": lambda source, request: source.metrics(_given(request, "cursor")),
    "table": lambda source, request: source.table(_numbers(request, "files")),
    "trajectory": lambda source, request: source.trajectory(
        **_step(request), trajectory_id=_given(request, "id")
    ),
    "timeline": lambda source, request: source.timeline(**_step(request)),
    "search": lambda source, request: source.search(_given(request, "text"), _numbers(request, "files")),
}
"""Functions that return the data of a request, by the last part of the request's path."""
EVALUATION_HANDLERS: dict[str, Callable[[Evaluations, Request], Any]] = {
    "evaluations": lambda evaluations, _: evaluations.listed(),
    "scores": lambda evaluations, request: evaluations.scores(request.query_params.getlist("key")),
    "evaluation": lambda evaluations, request: evaluations.evaluation(
        _given(request, "key"), by=_given(request, "by")
    ),
    "comparison": lambda evaluations, request: evaluations.comparison(
        _given(request, "key"), _given(request, "other"), by=_given(request, "by")
    ),
    "samples": lambda evaluations, request: evaluations.samples(
        _given(request, "key"), group=int(_given(request, "group"))
    ),
}

COLLECTION_HANDLERS: dict[str, Callable[[RunCollection, Request], Any]] = {
    "runs": lambda collection, _: collection.runs(),
    "metric-names": lambda collection, _: metric_names(collection),
    "curves": lambda collection, request: seed_curves(collection, request.query_params.getlist("name")),
    "prompt-index": lambda collection, request: collection.prompts.add_run(
        _given(request, "run"), collection.source(_given(request, "run")).path
    ),
    "prompts": lambda collection, request: collection.prompts.listed(_given(request, "text")),
    "prompt": lambda collection, request: collection.prompts.prompt(_given(request, "digest")),
}


def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.detail, status=error.status_code)


def _error(message: str, *, status: int) -> Response:
    return Response(encode_json({"error": message}), status_code=status, media_type="application/json")


RUN_PATH = "/run/{run}"
"""Path of the page of one run."""
NO_FORKS = "Forks need a viewer of one run. Start the viewer with this run alone and --server."


def create_collection_app(collection: RunCollection, *, hosts: Iterable[str] | None) -> Starlette:
    """Return an ASGI application that shows several runs, and each of them below `RUN_PATH`.

    Args:
        collection: The runs.
        hosts: Host names that requests may use, so that pages of other sites cannot reach the viewer. None allows all.
    """
    evaluations = Evaluations(collection.folders)
    by_run: dict[str, Evaluations] = {}

    def source_of(request: Request) -> RunSource:
        return collection.source(request.path_params["run"])

    def evaluations_of_run(request: Request) -> Evaluations:
        source = source_of(request)
        return by_run.setdefault(request.path_params["run"], Evaluations(lambda: {"": source.path}))

    def page(_: Request) -> Response:
        """Return the page of all runs. As long as there is only one, go to its own."""
        keys = list(collection.folders())
        if len(keys) == 1:
            return RedirectResponse(f"{RUN_PATH.format(run=quote(keys[0]))}/")
        return Response(first_page(RUNS_PAGE, home="runs"), media_type=media_type(RUNS_PAGE))

    routes = [
        Route("/", page),
        Route("/static/{name}", static_file),
        *api_routes(COLLECTION_HANDLERS, lambda _: collection),
        *api_routes(EVALUATION_HANDLERS, lambda _: evaluations),
        Route(RUN_PATH, _redirect),
        *run_routes(source_of, evaluations_of_run, prefix=RUN_PATH, up="../../"),
        Route(f"{RUN_PATH}/api/what-if", endpoint(lambda _: {"problem": NO_FORKS, "token": None})),
    ]
    return finished_app(routes, hosts=hosts)


def _redirect(request: Request) -> Response:
    return RedirectResponse(f"{request.url.path}/")
