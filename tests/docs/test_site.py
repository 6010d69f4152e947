"""The built site: links, files, width, and the search, opened from a folder in a browser without a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def build_log() -> list[str]:
    """Build the site, and return what the build printed."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    result = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
    return result.stdout.splitlines()


@pytest.fixture(scope="session")
def site(build_log: list[str]) -> Path:
    return ROOT / "build" / "docs"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open a page on a narrow screen. The test fails if a script raises, or anything but a file is requested."""
    context = browser.new_context(viewport={"width": 400, "height": 900}, offline=True)
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    context.close()
    assert not errors
    assert [url for url in asked if not url.startswith(("file://", "data:", "blob:"))] == []


pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
KINDS = {".html", ".css", ".js", ".svg", ".png", ".json", ".map", ".xml", ".inv"}


class Links(HTMLParser):
    """Addresses that a page names, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        self.addresses |= {value for name in ("href", "src") if (value := values.get(name))}


def test_the_build_prints_no_warning(build_log: list[str]) -> None:
    expected = ("Build started", "No issues found", "Build finished")
    assert [line for line in build_log if line and not line.startswith(expected)] == []


def test_every_link_of_every_page_leads_somewhere(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html") if page.name != "404.html"}
    dead: list[str] = []
    for page, links in pages.items():
        for address in links.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append(f"{page.relative_to(site)}: {address}")
    assert len(pages) > 50
    assert dead == []


def test_the_site_has_nothing_but_pages_and_what_they_show(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file()]
    assert [str(path) for path in files if path.suffix not in KINDS and path.name != "LICENSE"] == []


def test_pages_need_no_network_and_no_scrolling_sideways(site: Path, page: Any) -> None:
    too_wide: list[str] = []
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":  # its addresses are absolute: it is for servers
            continue
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        tables = page.evaluate(
            "[...document.querySelectorAll('table')].filter(each => each.getBoundingClientRect().right > 401).length"
        )
        if width > 400 or tables:
            too_wide.append(f"{path.relative_to(site)}: {width} px, {tables} wide tables")
    assert too_wide == []


def test_the_search_finds_a_name_of_the_reference(site: Path, page: Any) -> None:
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.type("advantage_estimator")
    found = page.locator("a[href*='reference/training.html'][href*='agent_loop.advantage_estimator']").first
    found.wait_for(state="visible")
    found.click()
    page.wait_for_url("**/reference/training.html*")
