"""Browser tests of the pages with a real training run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from agent_loop.storage import StoredRun
from agent_loop.viewer.export import write_export
from tests.viewer.browser import shoot, viewing

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1000)]


def test_a_trained_run_can_be_explored_from_curves_to_tokens(page: Any, demo_run: Path) -> None:
    stored = StoredRun(demo_run)
    files = stored.files()
    count = sum(file.num_trajectories for file in files)
    with viewing(demo_run) as viewer:
        page.goto(viewer.url)
        page.locator(".finding").first.wait_for()
        page.locator(".chart").nth(9).wait_for()
        shoot(page, "demo-overview")
        page.get_by_role("link", name="Trajectories", exact=True).click()
        page.locator(".summary", has_text=f"{count:,} trajectories").wait_for()
        page.get_by_label("Filter success").fill("no")
        failing = stored.scalars(columns=["is_success"])["is_success"].to_pylist().count(False)
        page.locator(".summary", has_text=f"{failing:,} of {count:,}").wait_for()
        shoot(page, "demo-table")
        page.locator(".table .row a").first.click()
        page.locator(".message").first.wait_for()
        shoot(page, "demo-conversation")
        row = stored.trajectory(files[-1].split, files[-1].step, "group=0/rollout=0")
        page.goto(
            f"{viewer.url}#/trajectory?split={files[-1].split}&step={files[-1].step}&id=group%3D0%2Frollout%3D0&view=tokens"
        )
        page.get_by_text("Mask", exact=True).click()
        page.locator(".t.mask-1").first.wait_for()
        shoot(page, "demo-tokens")
        trained = page.evaluate(
            "new Set([...document.querySelectorAll('.t.mask-1')].map((t) => t.dataset.token)).size"
        )
        shown = page.evaluate(
            "new Set([...document.querySelectorAll('.t')].map((t) => t.dataset.token)).size"
        )
        if shown == len(row["prompt_ids"]) + len(row["response_ids"]):
            assert trained == int(row["response_mask"].sum())
        assert 0 < trained <= int(row["response_mask"].sum())
        page.goto(f"{viewer.url}#/time?split={files[-1].split}&step={files[-1].step}")
        page.locator(".gantt-row .kind-generate").first.wait_for()
        page.locator(".load-row").first.wait_for()
        shoot(page, "demo-time")
        before = {path: path.stat().st_mtime_ns for path in demo_run.rglob("*")}
        assert viewer.stop(signal.SIGKILL) == -signal.SIGKILL
        assert {path: path.stat().st_mtime_ns for path in demo_run.rglob("*")} == before


def test_the_export_of_a_trained_run_works_from_a_file(page: Any, demo_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    write_export(demo_run, target=target, max_trajectories=64)
    page.goto(target.as_uri())
    page.locator(".finding").first.wait_for()
    file = StoredRun(demo_run).files()[-1]
    page.goto(f"{target.as_uri()}#/time?split={file.split}&step={file.step}")
    page.locator(".gantt-row").first.wait_for()
    page.goto(
        f"{target.as_uri()}#/trajectory?split={file.split}&step={file.step}&id=group%3D0%2Frollout%3D1&view=tokens"
    )
    page.locator(".t").first.wait_for()
