"""Owners of resources, and processes that outlive them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.runtime.owner import (
    OWNER_VARIABLE,
    SPARED_SUFFIX,
    kill_orphans,
    kill_processes,
    num_spared_orphans,
    parse_owner,
    this_process,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], OWNER_VARIABLE: mark})


def dead_token() -> str:
    """Return the token of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    return replace(this_process(), pid=ended.pid).token


def test_a_token_begins_names_and_is_read_from_them() -> None:
    this = this_process()
    assert parse_owner(f"{this.token}.a1b2") == this
    assert parse_owner("container") is None
    assert not this.is_dead


def test_an_owner_is_dead_once_it_has_ended_or_its_id_belongs_to_another_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        owner = replace(this_process(), pid=child.pid, start=start_of(child.pid))
        assert not owner.is_dead
        assert replace(owner, start=owner.start - 1).is_dead
        child.kill()
    assert owner.is_dead


def test_owners_of_other_machines_and_boots_may_live() -> None:
    dead = replace(this_process(), pid=2**22 + 1)
    assert dead.is_dead
    assert not replace(dead, machine="00000000").is_dead
    assert not replace(dead, boot="00000000").is_dead


def test_marked_processes_are_killed_and_others_are_not() -> None:
    mark = f"{this_process().token}.meant"
    meant, other = sleeper(mark), sleeper(f"{this_process().token}.other")
    try:
        assert kill_processes(lambda owner: owner == mark) == 1
        assert meant.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_orphans_are_killed_except_those_that_end_by_themselves() -> None:
    token = dead_token()
    orphan, spared, owned = (
        sleeper(f"{token}.x"),
        sleeper(token + SPARED_SUFFIX),
        sleeper(this_process().token),
    )
    try:
        kill_orphans()
        assert orphan.wait(10) == -signal.SIGKILL
        assert (spared.poll(), owned.poll()) == (None, None)
        assert num_spared_orphans() >= 1
    finally:
        for process in (spared, owned):
            process.kill()
            process.wait()


def start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
