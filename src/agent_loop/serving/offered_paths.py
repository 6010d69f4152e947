"""Errors for paths and methods that an application does not offer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fastapi import Request
from fastapi.routing import APIRoute

_SESSION = re.compile(r"^/sessions/[^/]+")


def unknown_path_message(request: Request) -> str:
    """Return the message for a path that is not offered, with the paths that are."""
    path = _SESSION.sub("", request.url.path)
    return f"there is no {request.method} {path}; offered are {', '.join(_offered(request))}"


def _offered(request: Request) -> Iterator[str]:
    for route in request.app.routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods or ()):
                yield f"{method} {_SESSION.sub('', route.path)}"
