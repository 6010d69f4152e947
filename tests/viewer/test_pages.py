"""Browser tests of the pages with small runs and with runs that grow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.storage.json_lines import write_lines
from agent_loop.viewer.export import write_export
from tests.viewer.browser import Viewer, serious_faults, shoot, viewing
from tests.viewer.synthetic import (
    PIECES,
    add_step,
    prompt_of,
    sample_of,
    trajectory_rows,
    write_rows,
    write_run,
)

pytestmark = pytest.mark.browser

STEP = "split=train&step=6"
PAGES = {
    "overview": ("#/overview", ".chart"),
    "table": ("#/trajectories", ".table .row a"),
    "conversation": (f"#/trajectory?{STEP}&id=group%3D2%2Frollout%3D1", ".message"),
    "tokens": (f"#/trajectory?{STEP}&id=group%3D0%2Frollout%3D2&view=tokens&color=logprob", ".t"),
    "branches": (f"#/trajectory?{STEP}&id=group%3D1%2Frollout%3D0%2Fbranch%3D1", ".tree a"),
    "siblings": (f"#/group?{STEP}&group=0", ".turn-cell"),
    "fork": (f"#/fork?{STEP}&id=group%3D0%2Frollout%3D2&turn=2", ".turn-cell"),
    "time": (f"#/time?{STEP}", ".gantt-row"),
}
"""Address of each page, and what it shows once it is drawn."""


def open_page(page: Any, url: str, name: str) -> None:
    """Open a page and wait until the whole run has been loaded and drawn."""
    address, ready = PAGES[name]
    page.goto(url + address)
    page.locator("main[aria-busy=false]").wait_for()
    page.locator(ready).first.wait_for()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", list(PAGES))
def test_no_page_has_a_serious_accessibility_violation(
    page: Any, small_viewer: Viewer, name: str, scheme: str
) -> None:
    page.emulate_media(color_scheme=scheme)
    open_page(page, small_viewer.url, name)
    shoot(page, f"{name}-{scheme}")
    assert serious_faults(page) == []


def test_filters_select_rows_and_are_kept_in_the_address(page: Any, small_viewer: Viewer) -> None:
    open_page(page, small_viewer.url, "table")
    page.locator(".summary", has_text=re.compile("^102 trajectories")).wait_for()
    page.get_by_label("Filter failure").fill("toolbug")
    page.locator(".summary", has_text="6 of 102").wait_for()
    page.get_by_label("Filter step").fill(">4")
    page.locator(".summary", has_text="2 of 102").wait_for()
    assert "f.failure=toolbug" in page.url
    again = page.context.new_page()
    again.goto(page.url)
    again.locator(".summary", has_text="2 of 102").wait_for()
    page.get_by_label("Filter step").fill("many")
    page.locator("input[aria-invalid]").wait_for()


def test_search_finds_words_in_messages_but_not_json_keys(page: Any, small_viewer: Viewer) -> None:
    open_page(page, small_viewer.url, "table")
    page.get_by_label("Search in all messages").fill("NÄHER")
    page.locator(".summary", has_text="102 of 102").or_(
        page.locator(".summary", has_text="102 trajectories")
    ).wait_for()
    page.locator(".summary", has_text="searched 6 of 6").wait_for()
    page.get_by_label("Search in all messages").fill("tool_calls")
    page.locator(".summary", has_text="0 of 102").wait_for()


def test_rows_and_siblings_can_be_navigated_by_keyboard(page: Any, small_viewer: Viewer) -> None:
    open_page(page, small_viewer.url, "table")
    page.keyboard.press("j")
    page.keyboard.press("j")
    name = page.locator(".row.current a").inner_text()
    page.keyboard.press("Enter")
    page.locator(".trajectory-head h1", has_text=name).wait_for()
    page.locator(".message").first.wait_for()
    current = page.locator(".sibling[aria-current]")
    before = int(current.locator(".sibling-name").inner_text())
    page.keyboard.press("]")
    page.locator(".sibling[aria-current] .sibling-name", has_text=re.compile(f"^{before + 1}$")).wait_for()
    page.keyboard.press("[")
    page.locator(".sibling[aria-current] .sibling-name", has_text=re.compile(f"^{before}$")).wait_for()
    page.keyboard.press("Escape")
    page.locator(".table").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").get_by_text("Keys", exact=True).wait_for()


def test_tokens_are_coloured_by_their_mask(page: Any, small_viewer: Viewer) -> None:
    open_page(page, small_viewer.url, "tokens")
    page.get_by_text("Mask", exact=True).click()
    page.locator(".t.mask-1").first.wait_for()
    colours = page.evaluate(
        """async () => {
          const { decodePacket } = await import("./static/packets.js");
          const query = "split=train&step=6&id=" + encodeURIComponent("group=0/rollout=2");
          const { columns } = decodePacket(await (await fetch("api/trajectory?" + query)).arrayBuffer());
          const mask = columns.get("mask").values;
          const spans = [...document.querySelectorAll(".t[data-token]")];
          return spans.map((span) => [mask[span.dataset.token], span.classList.contains("mask-1") ? 1 : 0]);
        }"""
    )
    assert len(colours) > 30
    assert all(stored == shown for stored, shown in colours)
    page.locator(".t.mask-1").first.hover()
    for part in ("id", "log-prob", "trainer", "difference", "advantage", "version", "position"):
        page.locator(".token-details", has_text=part).wait_for()


def test_a_turn_whose_message_is_empty_shows_the_text_of_its_tokens(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=1)
    (row,) = trajectory_rows(1, group=0, rollout=0, random=np.random.default_rng(0), num_turns=1)
    messages = [*json.loads(row["messages"])[:-1], {"role": "assistant", "content": ""}]
    changed = {
        **row,
        "messages": json.dumps(messages),
        "seconds": row["seconds"] + 1.0,
        "other_s": row["other_s"] + 1.0,
    }
    write_rows(run / "trajectories" / "train-000001.parquet", [changed])
    pieces = [PIECES[token] for token in row["response_ids"][3:]]
    text = "".join(piece for piece in pieces if isinstance(piece, str)).strip()
    with viewing(run) as viewer:
        page.goto(f"{viewer.url}#/trajectory?split=train&step=1&id=group%3D0%2Frollout%3D0")
        page.locator(".message .token-text", has_text="no content and no tool call").wait_for()
        assert "€" in page.locator(".token-text pre").inner_text()
        assert text.split()[-1] in page.locator(".token-text pre").inner_text()
        times = page.locator("dl.numbers").first.inner_text().split("\n")
        assert times[-2:] == ["other", "1.01 s"]
        page.goto(f"{viewer.url}#/group?split=train&step=1&group=0")
        page.locator(".turn-cell .token-text pre", has_text="€").wait_for()


def test_data_of_a_run_never_becomes_markup(page: Any, small_viewer: Viewer) -> None:
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    for name in PAGES:
        open_page(page, small_viewer.url, name)
    assert dialogs == []
    assert page.locator("main img, main script").count() == 0
    open_page(page, small_viewer.url, "conversation")
    page.locator(".conversation", has_text="<script>alert(1)</script>").wait_for()
    page.locator(".why", has_text="<img src=x").wait_for()


def test_a_running_run_is_followed_without_affecting_it(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=2)
    with viewing(run) as viewer:
        open_page(page, viewer.url, "table")
        page.locator(".summary", has_text="34 trajectories").wait_for()
        add_step(run, step=3)
        page.locator(".summary", has_text="51 trajectories").wait_for(timeout=10_000)
        (run / "trajectories" / "train-000004.parquet").write_bytes(b"PAR1 half")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "rew')
        page.locator(".notice", has_text="train-000004.parquet").wait_for(timeout=10_000)
        add_step(run, step=5)
        page.locator(".summary", has_text="68 trajectories").wait_for(timeout=10_000)
        before = sorted(path.name for path in run.rglob("*"))
        assert viewer.stop() == 130
        page.locator(".notice", has_text="cannot be reached").wait_for(timeout=10_000)
        assert sorted(path.name for path in run.rglob("*")) == before


def test_the_exported_file_works_without_a_server(page: Any, run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    assert "102 trajectories, 20 in full" in write_export(run_folder, target=target, max_trajectories=20)
    url = target.as_uri()
    for name in ("overview", "table", "conversation", "siblings", "time"):
        open_page(page, url, name)
    page.locator(".notice", has_text="20 of 102 trajectories").wait_for()
    open_page(page, url, "table")
    page.get_by_label("Search in all messages").fill("order")
    page.locator(".summary", has_text=re.compile("of 102")).wait_for()
    page.goto(url + "#/trajectory?split=train&step=1&id=group%3D0%2Frollout%3D0")
    page.get_by_text("this file does not contain group=0/rollout=0").wait_for()
    shoot(page, "export")


COLOUR = "document.querySelector('input[name=color]:checked').value"


def test_texts_and_reward_parts_are_columns_that_can_be_filtered(page: Any, small_viewer: Viewer) -> None:
    open_page(page, small_viewer.url, "table")
    headings = page.locator(".head-row .cell").all_inner_texts()
    assert headings[2:7] == ["trajectory", "prompt", "last answer", "target", "reward"]
    assert headings[7:8] == ["acc"]
    assert headings.count("turns") == 1
    page.locator(".row .cell", has_text="On which shelf is the part?").first.wait_for()
    page.get_by_label("Filter target").fill("42")
    page.locator(".summary", has_text="0 of 102").wait_for()
    page.get_by_label("Filter target").fill("=41")
    page.get_by_label("Filter acc").fill("1")
    page.locator(".summary", has_text=re.compile("^102 trajectories")).wait_for()
    page.get_by_label("Filter last answer").fill("!shelf 41")
    page.locator(".summary", has_text="0 of 102").wait_for()


def test_the_address_names_the_colours_of_this_and_the_next_trajectory(
    page: Any, small_viewer: Viewer
) -> None:
    open_page(page, small_viewer.url, "tokens")
    assert page.evaluate(COLOUR) == "logprob"
    page.evaluate("location.hash = location.hash.replace('logprob', 'mask')")
    page.locator(".t.mask-1").first.wait_for()
    assert page.evaluate(COLOUR) == "mask"
    page.get_by_text("Weights", exact=True).click()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("]")
    page.locator(".sibling[aria-current] .sibling-name", has_text="3").wait_for()
    page.locator(".t.version-0").first.wait_for()
    assert page.evaluate(COLOUR) == "version"
    assert "color=version" in page.url


def test_table_curves_and_groups_of_a_running_run_grow(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=2)
    group = [
        r for n in range(2) for r in trajectory_rows(9, group=0, rollout=n, random=np.random.default_rng(n))
    ]
    with viewing(run) as viewer:
        open_page(page, viewer.url, "overview")
        page.locator(".chart", has_text="step 2").first.wait_for()
        page.locator("details.more summary", has_text="Other metrics").click()
        page.locator("details.more .chart").first.wait_for()
        write_rows(run / "trajectories" / "train-000009.parquet", group)
        add_step(run, step=10)
        page.locator(".chart", has_text="step 10").first.wait_for()
        page.locator("details.more[open] .chart", has_text="step 10").first.wait_for()
        page.locator(".figure", has_text="53").wait_for()
        page.goto(f"{viewer.url}#/group?split=train&step=9&group=0")
        page.locator("main", has_text="2 siblings").wait_for()
        more = trajectory_rows(9, group=0, rollout=2, random=np.random.default_rng(5))
        write_rows(run / "trajectories" / "train-000009.parquet", [*group, *more])
        page.locator("main", has_text="3 siblings").wait_for()
        page.locator(".sibling-head").nth(2).wait_for()


def test_a_file_of_json_lines_opens_like_a_run(page: Any, tmp_path: Path, run_folder: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_lines(path, [sample_of(group, 0, True) for group in range(3)], split="rollout")
    with viewing(path) as viewer:
        page.goto(f"{viewer.url}{PAGES['table'][0]}")
        page.locator(".summary", has_text="3 trajectories").wait_for()
        page.locator(".row .cell", has_text=prompt_of(2)).first.wait_for()
        page.locator(".table .row a").nth(2).click()
        page.locator(".message", has_text="Part 2 is on shelf 2.").first.wait_for()
        page.get_by_role("tab", name="Tokens").click()
        page.locator(".t").first.wait_for()
        shoot(page, "json-lines")


def test_siblings_differ_from_a_turn_on_and_the_straggler_is_named(page: Any, small_viewer: Viewer) -> None:
    open_page(page, small_viewer.url, "siblings")
    page.locator("main", has_text="the first difference is in turn 1").wait_for()
    assert page.locator(".sibling-head").count() == 4
    open_page(page, small_viewer.url, "time")
    name = page.locator(".gantt-name").first.inner_text()
    page.locator(".summary", has_text=f"The last to end was {name}").wait_for()
    page.locator(".load-row").nth(1).wait_for()
    page.locator(".gantt-name").first.click()
    page.locator(".trajectory-head h1", has_text=name).wait_for()
