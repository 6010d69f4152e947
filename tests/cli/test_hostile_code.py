"""Commands end even if user code never returns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.project import make_project

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from agent_loop.cli import main; main()"]
HOSTILE = """
import asyncio

async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def reward(output, row):
    asyncio.create_task(deaf())
    if row["prompt"] == "question 1":
        await asyncio.sleep(0.2)  # the other rows end
        print("deaf", flush=True)
        await deaf()
    return 1.0
"""


def test_a_rollout_ends_with_all_its_rows_although_a_reward_never_does(tmp_path: Path) -> None:
    make_project(tmp_path)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    options = [
        "reward.function=hostile.py:reward",
        "reward.timeout_s=0.5",
        "rollout.n=1",
        "--out",
        "out.jsonl",
    ]
    ended = subprocess.run(
        [*COMMAND, "rollout", "config.yaml", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["stop_reason"] for record in records].count("failed") == 1
    assert len(records) == 6
    assert "was abandoned" in ended.stderr


def test_ctrl_c_ends_a_rollout_that_waits_for_code_that_swallows_its_cancellation(tmp_path: Path) -> None:
    make_project(tmp_path)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    options = ["reward.function=hostile.py:reward", "reward.timeout_s=1000", "--out", "out.jsonl"]
    running = subprocess.Popen(
        [*COMMAND, "rollout", "config.yaml", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    for line in running.stdout:
        if "deaf" in line:
            break
    running.send_signal(signal.SIGINT)
    output = running.communicate(timeout=120)[0]
    assert running.returncode not in (0, None), output
    assert "stopped" in output
