"""HTTP application that shows several runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from agent_loop.viewer.app import evaluation_routes, finished_app, run_routes, static_file
from agent_loop.viewer.collection import RunCollection, metric_names, seed_curves
from agent_loop.viewer.evaluations import Evaluations
from agent_loop.viewer.pages import RUNS_PAGE, endpoint, first_page, media_type, names_of, text_of
from agent_loop.viewer.prompts import PromptIndex
from agent_loop.viewer.source import RunSource

RUN_PATH = "/run/{run}"
"""Path of the page of one run."""
MAX_METRICS = 24
"""Most metrics whose curves one request returns."""
NO_FORKS = "Forks need a viewer of one run. Start the viewer with this run alone and --server."


def create_collection_app(collection: RunCollection, *, hosts: Iterable[str] | None) -> Starlette:
    """Return an ASGI application that shows several runs, and each of them below `RUN_PATH`.

    Args:
        collection: The runs.
        hosts: Host names that requests may use, so that pages of other sites cannot reach the viewer. None allows all.
    """
    evaluations = Evaluations(collection.folders)
    by_run: dict[str, Evaluations] = {}
    prompts = PromptIndex()

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

    readers: dict[str, Callable[[Request], Any]] = {
        "runs": lambda _: collection.runs(),
        "metric-names": lambda _: metric_names(collection),
        "curves": lambda request: seed_curves(collection, names_of(request, "name", most=MAX_METRICS)),
        "prompt-index": lambda request: prompts.add_run(
            text_of(request, "run"), collection.source(text_of(request, "run")).path
        ),
        "prompts": lambda request: prompts.listed(text_of(request, "text")),
        "prompt": lambda request: prompts.prompt(text_of(request, "digest")),
    }
    routes = [
        Route("/", page),
        Route("/static/{name}", static_file),
        *(Route(f"/api/{name}", endpoint(read)) for name, read in readers.items()),
        *evaluation_routes(lambda _: evaluations),
        Route(RUN_PATH, _redirect),
        *run_routes(source_of, prefix=RUN_PATH, up="../../"),
        *evaluation_routes(evaluations_of_run, prefix=RUN_PATH),
        Route(f"{RUN_PATH}/api/what-if", endpoint(lambda _: {"problem": NO_FORKS, "token": None})),
    ]
    return finished_app(routes, hosts=hosts)


def _redirect(request: Request) -> Response:
    return RedirectResponse(f"{request.url.path}/")
