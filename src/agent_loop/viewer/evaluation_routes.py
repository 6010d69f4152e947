"""Routes of the pages of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route

from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.training.evaluation.summary import SUMMARY_FILE
from agent_loop.viewer.endpoints import endpoint, names_of, parse_number, text_of
from agent_loop.viewer.evaluations import Evaluations

MAX_KEYS = 50
"""Most evaluations whose scores one request returns."""


def evaluation_routes(evaluations_of: Callable[[Request], Evaluations], *, prefix: str = "") -> list[Route]:
    """Return the routes of the pages of evaluations.

    Args:
        evaluations_of: Returns the evaluations that a request is about.
        prefix: Start of the paths.
    """

    def reader(handler: Callable[[Evaluations, Request], Any]) -> Callable[[Request], Any]:
        return lambda request: handler(evaluations_of(request), request)

    return [Route(f"{prefix}/api/{name}", endpoint(reader(handler))) for name, handler in HANDLERS.items()]


def home_page(folder: Path) -> str:
    """Return the page that is shown first: that of evaluations if the folder holds one, else the usual page."""
    is_evaluation = (folder / SUMMARY_FILE).is_file() and not (folder / METRICS_FILE).exists()
    return "evaluations" if is_evaluation else ""


def _listed(evaluations: Evaluations, _: Request) -> Any:
    return evaluations.listed()


def _scores(evaluations: Evaluations, request: Request) -> Any:
    return evaluations.scores(names_of(request, "key", most=MAX_KEYS))


def _evaluation(evaluations: Evaluations, request: Request) -> Any:
    return evaluations.evaluation(text_of(request, "key"), by=text_of(request, "by"))


def _comparison(evaluations: Evaluations, request: Request) -> Any:
    key, other = text_of(request, "key"), text_of(request, "other")
    return evaluations.comparison(key, other, by=text_of(request, "by"))


def _samples(evaluations: Evaluations, request: Request) -> Any:
    group = parse_number(request.query_params.get("group", ""))
    if group is None:
        raise HTTPException(400, "group is not a number; give the index of a row")
    return evaluations.samples(text_of(request, "key"), group=group)


HANDLERS: dict[str, Callable[[Evaluations, Request], Any]] = {
    "evaluations": _listed,
    "scores": _scores,
    "evaluation": _evaluation,
    "comparison": _comparison,
    "samples": _samples,
}
"""Functions that return the data of a request, by the last part of the request's path."""
