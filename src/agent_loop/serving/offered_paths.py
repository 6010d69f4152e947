"""Errors for paths and methods that an application does not offer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import Request

_SESSION = re.compile(r"^/sessions/[^/]+")


def unknown_path_message(request: Request) -> str:
    """Return the message for a path that is not offered, with the paths that are."""
    path = _SESSION.sub("", request.url.path)
    return f"there is no {request.method} {path}; offered are {', '.join(_offered(request))}"


def _offered(request: Request) -> Iterator[str]:
    described: Mapping[str, Mapping[str, Any]] = request.app.openapi()["paths"]  # written once, and then kept
    for path, operations in described.items():
        for method in operations:
            yield f"{method.upper()} {_SESSION.sub('', path)}"
