"""Browser tests of the pages of several runs and of evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.browser import Viewer, serious_faults, shoot, viewing
from tests.viewer.synthetic import prompt_of, write_collection

pytestmark = pytest.mark.browser

FLIPS = "#/flips?key=evals~trained%7Call&other=evals~base%7Call"
PAGES = {
    "runs": ("#/runs", ".chart"),
    "prompts": ("#/prompts", "table.plain a"),
    "prompt": ("#/prompts", "table.plain a"),
    "evaluations": ("#/evaluations", ".categories"),
    "flips": (f"{FLIPS}&row=3&by=level", ".pair-grid .turn-cell"),
    "evaluation": ("run/evals~base/", ".categories"),
    "validations": ("run/high-0/#/evaluations", ".chart"),
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def viewer(collection: Path) -> Iterator[Viewer]:
    with viewing(collection) as viewer:
        yield viewer


def open_page(page: Any, viewer: Viewer, name: str) -> None:
    path, ready = PAGES[name]
    page.goto(viewer.url + path)
    page.locator("main[aria-busy=false]").wait_for()
    page.locator(ready).first.wait_for()
    if name == "prompt":
        page.get_by_role("link", name=prompt_of(1), exact=True).click()
        page.locator(".samples a").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", list(PAGES))
def test_no_page_has_a_serious_accessibility_violation(
    page: Any, viewer: Viewer, name: str, scheme: str
) -> None:
    page.emulate_media(color_scheme=scheme)
    open_page(page, viewer, name)
    shoot(page, f"{name}-{scheme}")
    assert serious_faults(page) == []


def test_runs_are_listed_with_their_state_scores_and_changed_settings(page: Any, viewer: Viewer) -> None:
    open_page(page, viewer, "runs")
    rows = page.locator("table.runs tbody tr").all_inner_texts()
    cells = {row.split("\t")[1]: [cell.strip() for cell in row.split("\t")] for row in rows}
    assert cells["low-1"][2:] == ["finished", "6 of 6", "0.45", "0.35", "1", "tiny", "lr=1e-06"]
    assert cells["high-0"][2:8] == ["finished", "6 of 6", "0.9", "0.8", "0", "tiny"]
    assert cells["evals/base"][5] == "0.333"
    groups = {name: found[0] for name, found in cells.items()}
    assert groups["low-0"] == groups["low-1"] != groups["high-0"] == groups["high-1"]


def test_curves_have_bands_over_seeds_that_can_be_replaced_by_single_runs(page: Any, viewer: Viewer) -> None:
    from playwright.sync_api import expect  # late: needed by the tests with a browser alone

    open_page(page, viewer, "runs")
    chart = page.locator(".chart", has_text="reward / mean").first
    assert chart.locator("path.band").count() == 2
    assert chart.locator("path.line").count() == 2
    assert "0.925" in chart.inner_text()  # the mean of 0.9 and 0.95
    page.get_by_role("combobox", name="Band").select_option("runs")
    chart.locator("path.line").nth(3).wait_for()
    assert chart.locator("path.band").count() == 0
    page.get_by_role("button", name=re.compile("^A")).click()
    expect(chart.locator("path.line")).to_have_count(2)
    page.get_by_label("Find a metric").fill("entropy")
    page.locator(".chart", has_text="actor / entropy").wait_for()
    expect(page.locator(".chart")).to_have_count(1)
    assert "metric=entropy" in page.url


def test_a_prompt_leads_to_its_trajectories_in_each_run_and_step(page: Any, viewer: Viewer) -> None:
    open_page(page, viewer, "prompts")
    page.get_by_label("Find a prompt").fill("part 1?")
    page.locator(".summary", has_text=re.compile("^1 prompt")).wait_for()
    page.get_by_role("link", name=prompt_of(1)).click()
    page.locator(".chart", has_text="Mean reward of the prompt").wait_for()
    section = page.get_by_role("region", name="high-1").or_(page.locator("section[aria-label='high-1']"))
    assert section.locator("tbody tr").count() == 8  # six steps of training and two validations
    section.locator("tr", has_text="val").first.locator("a").click()
    page.locator(".trajectory-head h1").wait_for()
    page.locator(".conversation", has_text="Part 1 is on shelf").wait_for()
    page.get_by_role("link", name="all runs").click()
    page.locator("table.runs").wait_for()


def test_an_evaluation_opens_with_its_scores_and_categories(page: Any, collection: Path) -> None:
    with viewing(collection / "evals" / "trained") as viewer:
        page.goto(viewer.url)
        page.locator(".categories").wait_for()
        text = page.locator(".tables").inner_text().replace("\t", " ")
        assert "pass@2 83.3 % 55.2 % to 95.3 %" in text
        assert page.locator(".categories tbody tr").count() == 2
        page.get_by_label("Categories").select_option("extra_info.id")
        page.locator(".categories tbody tr").nth(11).wait_for()
        page.get_by_role("link", name="3", exact=True).click()
        page.locator(".pair-grid .turn-cell", has_text="Part 3 is on shelf 4.").first.wait_for()
        page.locator(".prompt-line", has_text=prompt_of(3)).wait_for()


def test_flips_show_both_conversations_beside_each_other(page: Any, viewer: Viewer) -> None:
    page.goto(viewer.url + FLIPS)
    page.locator("main", has_text="7 rows pass that failed before; 1 row fails that passed before").wait_for()
    page.get_by_role("button", name="now fail (1)").click()
    page.locator("table tbody tr", has_text="now fails").locator("a").click()
    cells = page.locator(".pair-grid .turn-cell")
    cells.nth(1).wait_for()
    assert page.locator(".prompt-line").inner_text() == prompt_of(3)
    assert "Part 3 is on shelf 3." in cells.nth(0).inner_text()
    assert "Part 3 is on shelf 4." in cells.nth(1).inner_text()
    assert "flip=fail" in page.url
    page.locator(".pair-grid a").nth(1).click()
    page.locator(".conversation", has_text="Part 3 is on shelf 4.").wait_for()
