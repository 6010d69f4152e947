"""Whole runs of `agent-loop train` in two processes, and their ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from tests.cli.project import make_project
from tests.listeners import is_loopback, listening_addresses, process_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = ["-m", "agent_loop", "train", "config.yaml"]
TWO = "trainer.num_processes=2"
ENDLESS = ["trainer.total_steps=100000", "trainer.save_every=100000"]
REWARD = """
def reward(output, row):
    return sum(output.response_ids) % 7 / 7
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = make_project(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = yaml.safe_load(path.read_text())
    settings["reward"] = {"function": "reward.py:reward"}
    settings["rollout"]["n"] = 4
    settings["actor"]["ppo_mini_batches"] = 2
    path.write_text(yaml.safe_dump(settings))
    return tmp_path


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def values_of(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(folder / "metrics.jsonl")]


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start two processes and return after two steps."""
    process = subprocess.Popen(
        [sys.executable, *TRAIN, TWO, *ENDLESS, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step 2/"):
            return process
    raise AssertionError(output)


def ranks_of(rank_0: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{rank_0.pid}/task/{rank_0.pid}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"agent_loop.training.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def assert_ends(pid: int, *, within_s: float) -> None:
    give_up_at = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < give_up_at, f"process {pid} is still there"
        time.sleep(0.05)


def test_torchrun_trains_and_one_process_resumes_from_its_checkpoint(project: Path) -> None:
    run([*TORCHRUN, *TRAIN], project)
    output = run([sys.executable, *TRAIN, "--resume", "trainer.total_steps=4"], project)

    assert "resuming after step 3" in output
    assert values_of(project / "run", "step") == [1, 2, 3, 4]
    assert all(norm > 0 for norm in values_of(project / "run", names.GRAD_NORM))
    # The servers sample with the trained weights.
    assert max(values_of(project / "run", names.LOGPROB_DIFF_MAX)) < 1e-4


def test_ctrl_c_writes_a_checkpoint_and_ends_all_processes(project: Path) -> None:
    rank_0 = started(project)
    (rank_1,) = ranks_of(rank_0)

    rank_0.send_signal(signal.SIGINT)
    output = rank_0.communicate(timeout=100)[0]

    assert rank_0.returncode == 130, output
    assert_ends(rank_1, within_s=5)
    last = len(values_of(project / "run", "step"))
    output = run([sys.executable, *TRAIN, TWO, "--resume", f"trainer.total_steps={last + 1}"], project)
    assert f"resuming after step {last}" in output


def test_processes_of_one_machine_listen_on_loopback_only(project: Path) -> None:
    rank_0 = started(project)
    addresses = listening_addresses(process_tree(rank_0.pid))
    rank_0.kill()
    rank_0.communicate()

    assert addresses
    assert all(map(is_loopback, addresses)), addresses


def test_a_process_that_dies_ends_the_others_with_an_error_that_names_it(project: Path) -> None:
    rank_0 = started(project)
    (rank_1,) = ranks_of(rank_0)

    os.kill(rank_1, signal.SIGKILL)
    output = rank_0.communicate(timeout=60)[0]

    assert rank_0.returncode == 2, output
    assert (
        "ProcessGroupError: of the 2 processes that train together, process 1 ended with exit code -9"
        in output
    )
    assert "Traceback" not in output


def test_the_other_ranks_end_if_rank_0_is_killed(project: Path) -> None:
    rank_0 = started(project)
    (rank_1,) = ranks_of(rank_0)

    rank_0.kill()
    rank_0.communicate()

    assert_ends(rank_1, within_s=5)


def test_an_error_of_all_processes_is_shown_and_ends_the_run(project: Path) -> None:
    command = [sys.executable, *TRAIN, TWO, "actor.kl_loss_coef=0.1", "model.lora_rank=2"]
    done = subprocess.run(
        [*command, "model.target_modules=[nothing_like_this]"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 2
    assert "model.target_modules is ['nothing_like_this']" in done.stderr
    assert "Traceback" not in done.stderr
