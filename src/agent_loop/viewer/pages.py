"""Static files of the page, and endpoints that return JSON or a packet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from agent_loop.errors import DataError
from agent_loop.runtime.describe import one_line
from agent_loop.viewer.packets import encode_json

HEAD_END = "</head>"
STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">')
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FIRST_PAGE = "index.html"
"""Page of one run."""
RUNS_PAGE = "runs.html"
"""Page of several runs."""
HTML_TAG = '<html lang="en">'


@cache
def static_files() -> Mapping[str, str]:
    """Return the texts of the static files by name."""
    folder = files("agent_loop.viewer") / "static"
    return {
        item.name: item.read_text(encoding="utf-8")
        for item in sorted(folder.iterdir(), key=lambda item: item.name)
        if media_type(item.name)
    }


@cache
def first_page(name: str = FIRST_PAGE, *, home: str = "", up: str = "") -> str:
    """Return an HTML page. It preloads all modules, so that the browser requests them in parallel.

    Args:
        name: Name of the page.
        home: Page that is shown first; empty for the usual one.
        up: Address of the page of all runs; empty if there is none.
    """
    texts = static_files()
    preloads = (
        f'<link rel="modulepreload" href="static/{name}">\n' for name in texts if name.endswith(".js")
    )
    data = "".join(f' data-{key}="{value}"' for key, value in {"home": home, "up": up}.items() if value)
    page = texts[name].replace(HTML_TAG, f"{HTML_TAG[:-1]}{data}>")
    return page.replace(HEAD_END, "".join(preloads) + HEAD_END)


def style_names() -> list[str]:
    """Return the names of the style sheets in the order of the page."""
    return STYLE.findall(static_files()[FIRST_PAGE])


def media_type(name: str) -> str:
    """Return the media type of a file; empty if the file is not part of the page."""
    return next((kind for ending, kind in MEDIA_TYPES.items() if name.endswith(ending)), "")


MAX_MESSAGE = 300
"""Most characters of an error message."""


def endpoint(read: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that sends what `read` returns: a response, a packet, or values as JSON.

    The endpoint is synchronous, so that Starlette runs it in a thread while it reads files.
    """

    def respond(request: Request) -> Response:
        try:
            reply = read(request)
        except DataError as error:
            raise HTTPException(404, one_line(str(error), max_length=MAX_MESSAGE)) from error
        except (ValueError, OverflowError) as error:  # a wrong parameter, such as a step that is not a number
            raise HTTPException(400, one_line(str(error), max_length=MAX_MESSAGE)) from error
        if isinstance(reply, Response):
            return reply
        if isinstance(reply, bytes):
            return Response(reply, media_type="application/octet-stream")
        return Response(encode_json(reply), media_type="application/json")

    return respond
