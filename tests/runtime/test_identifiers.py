from __future__ import annotations

import os
import random

import pytest

from agent_loop.runtime.identifiers import new_id


def test_ids_differ_although_a_program_seeds_random() -> None:
    random.seed(0)
    before = new_id()
    random.seed(0)
    assert len({before, *(new_id() for _ in range(1000))}) == 1001
    assert len(before) == 32


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_creates_different_ids() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, new_id().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 100).decode() != new_id()
