"""The table of model families in docs/engines.md: `python -m tests.families.page` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.per_request_backend import PerRequestBackend
from tests.families.zoo import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
START, END = "<!-- families -->\n", "<!-- end of families -->\n"
SHARED, TURNS, COMPLETIONS, NO_CACHE, REFUSED = (
    "one cache for all requests (`shared`)",
    "a cache per request, resumed by its next turn (`per_request`)",
    "a cache per completion (`per_request`)",
    "no cache (`none`)",
    "refused",
)
WAYS = (SHARED, TURNS, COMPLETIONS, NO_CACHE, REFUSED)


def way_of(server: EmbeddedServer) -> str:
    """Return how a server computes its model."""
    backend = server._engine.backend
    if not isinstance(backend, PerRequestBackend):
        return SHARED
    if backend.kind == "none":
        return NO_CACHE
    return TURNS if backend.resumes_turns else COMPLETIONS


def documented_ways() -> dict[str, str]:
    """Read the way of each family from the page."""
    text = PAGE.read_text()
    rows = re.findall(
        r"^\| (.+?) \| \d+ \| (.*?) \|$", text[text.index(START) : text.index(END)], re.MULTILINE
    )
    return {family: way for way, families in rows for family in re.findall(r"`([^`]+)`", families)}


def main() -> None:
    families: dict[str, list[str]] = {way: [] for way in WAYS}
    for name, family in FAMILIES.items():
        try:
            server = EmbeddedServer(family.build(), config=EmbeddedConfig(max_model_len=128, max_slots=8))
        except ConfigError as error:
            print(f"{name}: {error}")
            families[REFUSED].append(name)
            continue
        families[way_of(server)].append(name)
    rows = [
        f"| {way} | {len(names)} | {', '.join(f'`{n}`' for n in names)} |\n"
        for way, names in families.items()
    ]
    table = "".join(["| computed with | count | families |\n|---|---|---|\n", *rows])
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(START) + len(START)] + table + text[text.index(END) :])


if __name__ == "__main__":
    main()
