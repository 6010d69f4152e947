"""Table of model families in docs/engines.md. `python -m tests.families.page` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.per_request_backend import PerRequestBackend
from tests.families.zoo import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
START, END = "<!-- families -->\n", "<!-- end of families -->\n"
SHARED, TURNS, COMPLETIONS, NO_CACHE, NOT_SUPPORTED = (
    "one cache for all requests (`shared`)",
    "a cache per request, resumed by its next turn (`per_request`)",
    "a cache per completion (`per_request`)",
    "no cache (`none`)",
    "not supported",
)
BACKENDS = (SHARED, TURNS, COMPLETIONS, NO_CACHE, NOT_SUPPORTED)


def backend_of(server: EmbeddedServer) -> str:
    """Return the table's name of a server's backend."""
    backend = server._engine.backend
    if not isinstance(backend, PerRequestBackend):
        return SHARED
    if backend.kind == "none":
        return NO_CACHE
    return TURNS if backend.resumes_turns else COMPLETIONS


def documented_backends() -> dict[str, str]:
    """Read the backend of each family from the page."""
    text = PAGE.read_text()
    rows = re.findall(
        r"^\| (.+?) \| \d+ \| (.*?) \|$", text[text.index(START) : text.index(END)], re.MULTILINE
    )
    return {family: backend for backend, families in rows for family in re.findall(r"`([^`]+)`", families)}


def main() -> None:
    """Choose the backend of each family and write the table."""
    families: dict[str, list[str]] = {backend: [] for backend in BACKENDS}
    for name, family in FAMILIES.items():
        try:
            server = EmbeddedServer(family.build(), config=EmbeddedConfig(max_model_len=128, max_slots=8))
        except ConfigError as error:
            print(f"{name}: {error}")
            families[NOT_SUPPORTED].append(name)
            continue
        families[backend_of(server)].append(name)
    rows = [
        f"| {backend} | {len(names)} | {', '.join(f'`{n}`' for n in names)} |\n"
        for backend, names in families.items()
    ]
    table = "".join(["| backend | count | families |\n|---|---|---|\n", *rows])
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(START) + len(START)] + table + text[text.index(END) :])


if __name__ == "__main__":
    main()
