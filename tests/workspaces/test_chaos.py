"""200 trajectories in containers, while containers, programs and the driver are killed: nothing is left."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent_loop.runtime.owner import OWNER_VARIABLE, parse_owner
from tests.listeners import listening_addresses

pytestmark = [
    pytest.mark.containers,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        shutil.which("podman") is None, reason="needs podman: tests/workspaces/install_containers.sh"
    ),
]

ROOT = Path(__file__).parents[2]
NUM_TRAJECTORIES = 200
NUM_DRIVER_KILLS = 6
KILL_EVERY = 5
"""One container or program is killed for about so many trajectories that end."""
SEED = 26
LIMIT_S = 1400.0
KNOWN_FAILURES = re.compile(
    r"has ended|cannot start a container|exited with status|ended by signal|cannot be made"
)


@dataclass
class Run:
    """The drivers of one run, of which one lives at a time."""

    folder: Path
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def results(self) -> list[dict[str, Any]]:
        """The trajectories that have ended. The last line of a driver that was killed may be incomplete."""
        path = self.folder / "results"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def left(self) -> list[int]:
        ended = {result["index"] for result in self.results}
        return [index for index in range(NUM_TRAJECTORIES) if index not in ended]

    def start_driver(self) -> subprocess.Popen[bytes]:
        (self.folder / "indices").write_text(json.dumps(self.left))
        command = [sys.executable, "-m", "tests.workspaces.chaos_driver", str(self.folder)]
        env = {**os.environ, "TMPDIR": str(self.folder / "tmp")}
        self.drivers.append(subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True))
        return self.drivers[-1]

    def is_ours(self, name: str) -> bool:
        owner = parse_owner(name)
        return owner is not None and owner.pid in {driver.pid for driver in self.drivers}

    def containers(self, *options: str) -> list[str]:
        listed = subprocess.run(
            ["podman", "ps", "--format", "{{.Names}}", *options], capture_output=True, text=True
        )
        return [name for name in listed.stdout.split() if self.is_ours(name)]

    def processes(self) -> list[int]:
        """Return the processes that carry the mark of a driver, in containers and beside them."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            owners = [v.partition("=")[2] for v in variables if v.startswith(f"{OWNER_VARIABLE}=")]
            if any(self.is_ours(owner) for owner in owners):
                found.append(int(folder.name))
        return found

    def listening(self) -> list[Any]:
        """Return the addresses at which the drivers and their processes accept connections."""
        return listening_addresses([*(driver.pid for driver in self.drivers), *self.processes()])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "tmp").mkdir()
    run = Run(tmp_path)
    yield run
    for driver in run.drivers:
        driver.kill()
        driver.wait()
    for name in run.containers("--all"):
        subprocess.run(["podman", "rm", "--force", "--time", "0", name], check=False)


def wait_until(condition: Callable[[], bool], *, deadline: float) -> None:
    while not condition():
        assert time.monotonic() < deadline, "the trajectories take too long"
        time.sleep(0.05)


def kill_something(run: Run, dice: random.Random) -> bool:
    """Kill a container in use, the first process or the program in it, or the runtime's client of a program.

    Return False if there is none at the moment.
    """
    commands = {pid: command_of(pid) for pid in run.processes()}
    clients = [pid for pid, words in commands.items() if words[0] == "podman" and words[1] == "exec"]
    programs = [pid for pid, words in commands.items() if words[0] == "sh" and "sleep 0.5" in words[2]]
    if not clients or not programs:
        return False
    client = dice.choice(clients)
    name = next(word for word in commands[client] if run.is_ours(word))
    way = dice.choice(["container", "first process", "program", "client"])
    if way == "container":
        subprocess.run(["podman", "kill", name], capture_output=True, check=False)
    elif way == "first process":
        show = ["podman", "inspect", "--format", "{{.State.Pid}}", name]
        pid = subprocess.run(show, capture_output=True, text=True, check=False).stdout.strip()
        if pid.isdigit() and int(pid) > 1:
            kill(int(pid))
    else:
        kill(client if way == "client" else dice.choice(programs))
    return True


def command_of(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        words = []
    return [words[0].rpartition("/")[2], *words[1:]] + [""] * (3 - len(words)) if words else [""] * 3


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_nothing_is_left_of_200_trajectories_whose_containers_programs_and_driver_were_killed(
    run: Run,
) -> None:
    dice = random.Random(SEED)
    deadline = time.monotonic() + LIMIT_S
    driver_kills = sorted(dice.sample(range(10, NUM_TRAJECTORIES - 10), NUM_DRIVER_KILLS))
    driver, num_kills = run.start_driver(), 0
    while run.left:
        num_ended = NUM_TRAJECTORIES - len(run.left)
        if driver_kills and num_ended >= driver_kills[0]:
            driver_kills.pop(0)
            wait_until(lambda: bool(run.containers()), deadline=deadline)
            time.sleep(dice.random())  # any moment of a trajectory
            driver.kill()
            driver.wait()
            driver = run.start_driver()
        elif num_ended // KILL_EVERY > num_kills:
            num_kills += kill_something(run, dice)
        if driver.poll() is not None and run.left:
            pytest.fail(f"the driver ended with exit code {driver.returncode}")
        assert time.monotonic() < deadline, f"{len(run.left)} trajectories are left"
        time.sleep(0.05)
    assert driver.wait(timeout=120) == 0
    check_results(run.results)

    # A driver that is killed with containers that work, wait and start, and then the next start.
    (run.folder / "results").unlink()
    driver = run.start_driver()
    wait_until(lambda: len(run.containers()) >= 4, deadline=deadline)
    driver.kill()
    driver.wait()
    assert run.containers()
    (run.folder / "results").write_text(
        "".join(json.dumps({"index": i}) + "\n" for i in range(4, NUM_TRAJECTORIES))
    )
    assert run.start_driver().wait(timeout=300) == 0

    assert run.containers("--all", "--external") == []
    wait_until(lambda: not run.processes(), deadline=time.monotonic() + 30)
    assert run.listening() == []
    [root] = (run.folder / "tmp").glob("agent-loop-workspaces-*")
    assert list(root.iterdir()) == []


def check_results(results: list[dict[str, Any]]) -> None:
    failures = [result["failure"] for result in results if result["failure"]]
    unknown = [failure for failure in failures if not KNOWN_FAILURES.search(failure)]
    assert unknown == []
    assert NUM_TRAJECTORIES // KILL_EVERY // 4 < len(failures) < NUM_TRAJECTORIES // 2
    for result in results:
        if result["failure"] is None:
            assert result["num_tokens"] > 0
    well = [result for result in results if result["failure"] is None]
    assert sum(result["reward"] == 1.0 for result in well) >= 0.9 * len(well)
