"""Browser tests of what stays where it is: menus, places under the pointer, colours, legends, growing runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.storage.json_lines import write_lines
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.viewer.browser import Viewer, shoot, viewing
from tests.viewer.synthetic import add_step, trajectory_rows, write_rows, write_run
from tests.viewer.test_pages import PAGES, open_page

pytestmark = pytest.mark.browser

PLACES = "[...document.querySelectorAll('.chart, .tokens')].map((e) => [e.offsetTop, e.offsetHeight]).join()"
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


def test_pointing_at_charts_and_tokens_moves_nothing(page: Any, small_viewer: Viewer) -> None:
    open_page(page, small_viewer.url, "overview")
    page.locator(".finding").first.wait_for()
    before = page.evaluate(PLACES)
    for chart in page.locator(".chart svg").all()[:6]:
        chart.hover(position={"x": 120, "y": 60})
        assert page.evaluate(PLACES) == before
    open_page(page, small_viewer.url, "tokens")
    before = page.evaluate(PLACES)
    for kind in (".t.mask-0", ".t:not(.mask-0)"):
        page.locator(kind).first.hover()
        page.locator(".token-details", has_text="position").wait_for()
        assert page.evaluate(PLACES) == before


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


def test_a_token_without_a_log_prob_of_the_trainer_says_why(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=1)
    (row,) = trajectory_rows(2, group=0, rollout=0, random=np.random.default_rng(0))
    validation = {**row, "split": "val", "train_logprobs": None, "advantages": None, "advantage": None}
    write_rows(run / "trajectories" / "val-000002.parquet", [validation], step=2, split="val")
    with viewing(run) as viewer:
        page.goto(
            f"{viewer.url}#/trajectory?split=train&step=1&id=group%3D0%2Frollout%3D0&view=tokens&color=mask"
        )
        page.locator(".t.mask-0").first.hover()
        page.locator(".token-details", has_text="the model did not sample this token").wait_for()
        page.goto(
            f"{viewer.url}#/trajectory?split=val&step=2&id=group%3D0%2Frollout%3D0&view=tokens&color=mask"
        )
        page.locator(".t.mask-1").first.hover()
        page.locator(".token-details", has_text="trajectories of val are not trained on").wait_for()


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
        write_rows(run / "trajectories" / "train-000009.parquet", group, step=9)
        add_step(run, step=10)
        page.locator(".chart", has_text="step 10").first.wait_for()
        page.locator("details.more[open] .chart", has_text="step 10").first.wait_for()
        page.locator(".figure", has_text="53").wait_for()
        page.goto(f"{viewer.url}#/group?split=train&step=9&group=0")
        page.locator("main", has_text="2 siblings").wait_for()
        more = trajectory_rows(9, group=0, rollout=2, random=np.random.default_rng(5))
        write_rows(run / "trajectories" / "train-000009.parquet", [*group, *more], step=9)
        page.locator("main", has_text="3 siblings").wait_for()
        page.locator(".sibling-head").nth(2).wait_for()


def test_rows_in_sight_stay_in_place_while_the_table_grows(page: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=6)
    with viewing(run) as viewer:
        open_page(page, viewer.url, "table")
        page.evaluate("document.querySelector('.table').scrollTop = 40 * 27")
        top = "document.elementFromPoint(150, 240).closest('.row').innerText"
        page.locator("#row-45").wait_for()
        before = page.evaluate(top)
        add_step(run, step=7)
        page.locator(".summary", has_text="119 trajectories").wait_for()
        page.wait_for_function(f"{top} === {json.dumps(before)}")


def test_a_file_of_json_lines_opens_like_a_run(page: Any, tmp_path: Path, run_folder: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_lines(path, map(_trajectory, range(3)), split="rollout")
    with viewing(path) as viewer:
        page.goto(f"{viewer.url}{PAGES['table']}")
        page.locator(".summary", has_text="3 trajectories").wait_for()
        page.locator(".row .cell", has_text="What is 2?").first.wait_for()
        page.locator(".table .row a").nth(2).click()
        page.locator(".message", has_text="It is 4.").first.wait_for()
        page.get_by_role("tab", name="Tokens").click()
        page.locator(".t").first.wait_for()
        shoot(page, "json-lines")


def _trajectory(number: int) -> Trajectory:
    messages = [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"It is {number * 2}."},
    ]
    logprobs = np.array([-0.5, -0.25], np.float32)
    segments = [
        Segment(as_token_ids([1, 2, 3]), Origin.PROMPT),
        Segment(as_token_ids([4, 5]), Origin.MODEL, weight_version=0, logprobs=logprobs),
    ]
    output = AgentLoopOutput(segments=segments, messages=messages)
    row = {"raw_prompt": messages[:1], "answer": number}
    return Trajectory(output, row, number, 0, 1.0, {"exact": 1})
