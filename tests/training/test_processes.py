"""Real processes of `agent-loop train`: killed again and again, forked, and two that train together."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from tests.cli.project import make_project
from tests.harness import is_nightly
from tests.listeners import is_loopback, listening_addresses, process_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

TRAIN = [sys.executable, "-m", "agent_loop", "train", "config.yaml"]


def change_settings(folder: Path, **sections: dict[str, Any]) -> None:
    """Write a project into the folder, and set values of its settings."""
    folder.mkdir(exist_ok=True)
    path = make_project(folder)
    settings = yaml.safe_load(path.read_text())
    for section, values in sections.items():
        settings[section] = settings.get(section, {}) | values
    path.write_text(yaml.safe_dump(settings))


def run(
    command: list[str], folder: Path, *, returncode: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == returncode, done.stdout + done.stderr
    return done


def started(command: list[str], folder: Path, *, until: str) -> tuple[subprocess.Popen[str], str]:
    """Start a process, and return it with its output up to the first line that matches."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if re.match(until, line):
            return process, output
    raise AssertionError(output)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def values_of(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines_of(folder)]


NUM_KILLS = 10 if is_nightly() else 4
NUM_ROWS, ROWS_PER_STEP, SAMPLES = 6, 2, 2
LOGGED_TRAIN = """
import json
import os
import sys

from agent_loop.cli import main
from agent_loop.training.ppo_trainer import TrainingLoop

learn = TrainingLoop._learn

def learn_and_tell(self, rollout):
    metrics = learn(self, rollout)
    trained = [[trajectory.row["number"], trajectory.rollout] for trajectory in rollout.trajectories]
    with open("trained.log", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "rows": trained}) + chr(10))
    return metrics

TrainingLoop._learn = learn_and_tell
sys.argv = ["agent-loop", "train", "config.yaml", *sys.argv[1:]]
main()
"""


def rows_of(step: int) -> list[list[int]]:
    first = (step - 1) * ROWS_PER_STEP
    return [[(first + row) % NUM_ROWS, sample] for row in range(ROWS_PER_STEP) for sample in range(SAMPLES)]


def test_a_training_that_is_killed_again_and_again_loses_at_most_a_step_each_time(tmp_path: Path) -> None:
    rng = random.Random(7)
    trainer = {"mode": "async", "max_staleness": 2, "total_steps": 100_000, "save_every": 1}
    change_settings(tmp_path, data={"shuffle": False}, trainer=trainer)
    rows = [{"prompt": f"question {n}", "number": n} for n in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "train.py").write_text(LOGGED_TRAIN)
    command = [sys.executable, "train.py", "--resume"]
    first_steps: dict[int, int] = {}
    """First step of each process."""
    for _ in range(NUM_KILLS):
        before = [line["step"] for line in lines_of(tmp_path)]
        process, output = started(command, tmp_path, until=r"step \d+/")
        time.sleep(rng.uniform(0, 1.5))
        process.kill()
        process.communicate()
        resumed_after = re.search(r"resuming after step (\d+)", output)
        first_steps[process.pid] = int(resumed_after[1]) + 1 if resumed_after else 1
        assert first_steps[process.pid] - 1 >= max(before, default=0) - 1, output

    last = max(values_of(tmp_path, "step"))
    run([*command, f"trainer.total_steps={last + 3:.0f}"], tmp_path)

    assert values_of(tmp_path, "step") == list(range(1, int(last) + 4))
    lines = [json.loads(line) for line in (tmp_path / "trained.log").read_text().splitlines()]
    for pid, first_step in first_steps.items():
        trained = [line["rows"] for line in lines if line["pid"] == pid]
        assert trained
        assert trained == [rows_of(first_step + number) for number in range(len(trained))]


KILLED_AFTER = 3
"""Continuations of the second step that have ended when the process is killed."""
THREE_TURNS = """
from agent_loop import AgentLoopBase, register


@register("three_turns")
class ThreeTurns(AgentLoopBase):
    async def run(self, sampling_params, **row):
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            for _ in range(2):
                await episode.observe([{"role": "user", "content": "go on"}])
                await episode.generate(sampling_params)
        return episode.output()


def reward(output, row):
    return float(int(output.response_ids[-1]) % 3)
"""
KILLED_TRAIN = f"""
import os
import signal

from agent_loop.cli import main
from agent_loop.rollout.manager import AgentLoopManager

run_forks = AgentLoopManager.run_forks

async def run_until_killed(self, forks, *, on_trajectory, label, **options):
    ended = []

    def note(trajectory):
        ended.append(trajectory)
        on_trajectory(trajectory)
        if os.environ.get("KILLED") and label.startswith("step=2") and len(ended) == {KILLED_AFTER}:
            os.kill(os.getpid(), signal.SIGKILL)

    return await run_forks(self, forks, on_trajectory=note, label=label, **options)

AgentLoopManager.run_forks = run_until_killed
main()
"""
FORKED = [sys.executable, "train.py", "train", "config.yaml"]


def make_forked(folder: Path, **trainer: Any) -> None:
    change_settings(
        folder,
        rollout={
            "n": 3,
            "response_length": 64,
            "agent": {"default_agent_loop": "three_turns", "loop_files": ["task.py"]},
            "multi_turn": {"max_turn_tokens": 3},
        },
        algorithm={"adv_estimator": "fork", "fork": {"choice": "every"}, "drop_zero_variance_groups": False},
        trainer={"total_steps": 3, "save_every": 3, **trainer},
    )
    (folder / "train.py").write_text(KILLED_TRAIN)
    (folder / "task.py").write_text(THREE_TURNS)


def test_a_run_that_is_killed_in_the_middle_of_its_forks_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [*FORKED, "rollout.deterministic=true", "actor.lr=0.01"]
    for folder in (whole, killed):
        make_forked(folder)
    run(command, whole)

    run(command, killed, returncode=-signal.SIGKILL, KILLED="1")
    output = run([*command, "--resume"], killed).stdout

    assert "continuations are in the journal" in output
    timed = ("timing", "time/", "perf/", "agent_loop/", "storage/")
    found, expected = (
        [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines_of(folder)]
        for folder in (killed, whole)
    )
    assert found == expected
    # Each trajectory has three turns of three tokens: two states, and two continuations of each.
    assert expected[0][names.FORK_TOKENS] == 2 * 6 * (6 + 3)
    for line in expected:
        assert line[names.FORK_STATES] == 2 * 6
        assert line[names.FORK_CONTINUATIONS] == 2 * 2 * 6
        assert line[names.FORK_LOST_SHARE] == 0
        assert line[names.ROWS_TRAINED] > 0


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TWO = "trainer.num_processes=2"
ENDLESS = ["trainer.total_steps=100000", "trainer.save_every=100000"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    change_settings(
        tmp_path,
        reward={"function": "reward.py:reward"},
        rollout={"n": 4},
        actor={"ppo_mini_batches": 2},
    )
    (tmp_path / "reward.py").write_text(
        "def reward(output, row):\n    return sum(output.response_ids) % 7 / 7\n"
    )
    return tmp_path


def two_started(folder: Path) -> subprocess.Popen[str]:
    """Start two processes and return rank 0 after two steps."""
    return started([*TRAIN, TWO, *ENDLESS], folder, until="step 2/")[0]


def other_rank_of(rank_0: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{rank_0.pid}/task/{rank_0.pid}/children").read_text().split()
    [rank_1] = [
        int(pid)
        for pid in children
        if b"agent_loop.training.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return rank_1


def assert_ends(pid: int, *, within_s: float) -> None:
    give_up_at = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < give_up_at, f"process {pid} is still there"
        time.sleep(0.05)


def test_torchrun_trains_and_one_process_resumes_from_its_checkpoint(project: Path) -> None:
    run([*TORCHRUN, *TRAIN[1:]], project)
    output = run([*TRAIN, "--resume", "trainer.total_steps=4"], project).stdout
    assert "resuming after step 3" in output
    assert values_of(project, "step") == [1, 2, 3, 4]
    assert all(norm > 0 for norm in values_of(project, names.GRAD_NORM))
    # The servers sample with the trained weights.
    assert max(values_of(project, names.LOGPROB_DIFF_MAX)) < 1e-4


def test_ctrl_c_writes_a_checkpoint_and_ends_both_processes_which_listen_on_loopback_only(
    project: Path,
) -> None:
    rank_0 = two_started(project)
    rank_1 = other_rank_of(rank_0)
    addresses = listening_addresses(process_tree(rank_0.pid))
    assert addresses
    assert all(map(is_loopback, addresses)), addresses
    rank_0.send_signal(signal.SIGINT)
    output = rank_0.communicate(timeout=100)[0]
    assert rank_0.returncode == 130, output
    assert_ends(rank_1, within_s=5)
    last = len(lines_of(project))
    output = run([*TRAIN, TWO, "--resume", f"trainer.total_steps={last + 1}"], project).stdout
    assert f"resuming after step {last}" in output


def test_a_process_that_dies_ends_the_others_with_an_error_that_names_it(project: Path) -> None:
    rank_0 = two_started(project)
    os.kill(other_rank_of(rank_0), signal.SIGKILL)
    output = rank_0.communicate(timeout=60)[0]
    assert rank_0.returncode == 2, output
    error = "of the 2 processes that train together, process 1 ended with exit code -9"
    assert f"ProcessGroupError: {error}" in output
    assert "Traceback" not in output


def test_the_other_ranks_end_if_rank_0_is_killed(project: Path) -> None:
    rank_0 = two_started(project)
    rank_1 = other_rank_of(rank_0)
    rank_0.kill()
    rank_0.communicate()
    assert_ends(rank_1, within_s=5)


def test_an_error_of_all_processes_is_shown_and_ends_the_run(project: Path) -> None:
    settings = ["actor.kl_loss_coef=0.1", "model.lora_rank=2", "model.target_modules=[nothing_like_this]"]
    done = run([*TRAIN, TWO, *settings], project, returncode=2)
    assert "model.target_modules is ['nothing_like_this']" in done.stderr
    assert "Traceback" not in done.stderr
