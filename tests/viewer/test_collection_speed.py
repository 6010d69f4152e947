"""Speed of the page of many large runs. Times are printed and compared with each other, because machines differ."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.config import Config
from tests.viewer.browser import shoot, viewing
from tests.viewer.large import write_many

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

NUM_RUNS = 20
PER_RUN = 5_000
NUM_STEPS = 300


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 20 runs with 100,000 trajectories, with complete settings and 60 metrics per step."""
    root = tmp_path_factory.mktemp("runs")
    first = write_many(root / "run-00", count=PER_RUN)
    for number in range(NUM_RUNS):
        run = root / f"run-{number:02d}"
        if number:
            shutil.copytree(first / "trajectories", run / "trajectories")
        config = Config().model_dump(mode="json")
        config["trainer"] |= {"seed": number % 5, "run_dir": str(run), "total_steps": NUM_STEPS}
        config["rollout"]["n"] = 4 + number // 5
        (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        names = {f"metric/{place}": place / 10 for place in range(56)}
        lines = [
            {
                "step": step,
                "reward/mean": step / NUM_STEPS * (1 + number % 5 / 20),
                "val/reward/mean": 0.5,
                **names,
            }
            for step in range(1, NUM_STEPS + 1)
        ]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return root


def test_twenty_runs_with_a_hundred_thousand_trajectories_are_listed_quickly(
    page: Any, many_runs: Path
) -> None:
    with viewing(many_runs) as viewer:
        started = time.monotonic()
        page.goto(viewer.url)
        page.locator("table.runs tbody tr").nth(NUM_RUNS - 1).wait_for()
        first_s = time.monotonic() - started
        page.locator(".chart").first.wait_for()
        curves_s = time.monotonic() - started
        shoot(page, "twenty-runs")
        page.goto("about:blank")
        started = time.monotonic()
        page.goto(viewer.url)
        page.locator("table.runs tbody tr").nth(NUM_RUNS - 1).wait_for()
        again_s = time.monotonic() - started
        started = time.monotonic()
        page.goto(f"{viewer.url}#/prompts")
        page.locator(".summary", has_text="prompt").wait_for()
        page.locator("table.plain a").or_(page.get_by_text("No stored trajectory")).first.wait_for(
            timeout=120_000
        )
        prompts_s = time.monotonic() - started
        print(
            f"\nlist {first_s:.2f} s (again {again_s:.2f} s), curves {curves_s:.2f} s, prompts {prompts_s:.2f} s"
        )
        assert min(first_s, again_s) < prompts_s, "the list reads no trajectories, which the prompts do"
