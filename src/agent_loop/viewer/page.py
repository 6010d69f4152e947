"""The files of the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

HEAD_END = "</head>"
STYLE = re.compile(r'<link rel="stylesheet" href="static/([\w.]+)">')
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FIRST_PAGE = "index.html"


@cache
def static_files() -> Mapping[str, str]:
    """Their texts, by name."""
    folder = files("agent_loop.viewer") / "static"
    return {
        item.name: item.read_text(encoding="utf-8")
        for item in sorted(folder.iterdir(), key=lambda item: item.name)
        if media_type(item.name)
    }


@cache
def first_page() -> str:
    """It names all modules, so that the browser asks for them at once and not one after the other."""
    texts = static_files()
    preloads = (
        f'<link rel="modulepreload" href="static/{name}">\n' for name in texts if name.endswith(".js")
    )
    return texts[FIRST_PAGE].replace(HEAD_END, "".join(preloads) + HEAD_END)


def style_names() -> list[str]:
    """The style sheets, in the order in which the page names them."""
    return STYLE.findall(static_files()[FIRST_PAGE])


def media_type(name: str) -> str:
    """Empty for what is no part of the page."""
    return next((kind for ending, kind in MEDIA_TYPES.items() if name.endswith(ending)), "")
