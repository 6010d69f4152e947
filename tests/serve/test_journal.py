"""Tests that an interrupted program runs again and receives the recorded completions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import unpack
from agent_loop.rollout.journal import HEADER, framed, read_records
from agent_loop.trajectory import IncidentKind
from agent_loop.trajectory.codec import decode_completion
from tests.helpers import user
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import RandomScript, facts, records_of, run_journaled

ROWS = [
    {
        "raw_prompt": user("-"),
        "program": "tests.serve.programs:leads_three_conversations",
        "question": "why" * number,
    }
    for number in (1, 2)
]
NUM_REQUESTS = 2 * 5


def make_harness(seed: int) -> WorkerHarness:
    return WorkerHarness(RandomScript(seed=seed, per_turn=2), agent="agent_program")


def test_a_journal_brings_every_conversation_back(tmp_path: Path) -> None:
    first = run_journaled(tmp_path / "j", make_harness(1), ROWS)
    assert [t.trajectory_id[-8:] for t in first] == ["branch=0", "branch=1", "branch=2"] * 2
    again = run_journaled(tmp_path / "j", make_harness(2), ROWS, resume=True)
    assert [facts(t) for t in again] == [facts(t) for t in first]


def test_all_completions_are_replayed_also_on_a_branch_from_an_earlier_position(tmp_path: Path) -> None:
    first = run_journaled(tmp_path / "j", make_harness(1), ROWS)
    payloads = read_records((tmp_path / "j").read_bytes())[0]
    kept = [p for p in payloads if unpack(p)["is"] not in (RecordKind.END, RecordKind.COMPLETE)]
    (tmp_path / "j").write_bytes(HEADER + b"".join(map(framed, kept)))
    script = RandomScript(seed=2, per_turn=2)
    again = run_journaled(tmp_path / "j", WorkerHarness(script, agent="agent_program"), ROWS, resume=True)
    assert script.num_requests == 0
    assert [facts(t) for t in again] == [facts(t) for t in first]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_completions_from_before_the_crash_are_replayed(tmp_path: Path, share: float) -> None:
    run_journaled(tmp_path / "j", make_harness(1), ROWS)
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "k").write_bytes(data[: int(len(data) * share)])
    kept = [r for r in records_of((tmp_path / "k").read_bytes()) if r["is"] == RecordKind.COMPLETION]
    script = RandomScript(seed=2, per_turn=2)
    again = run_journaled(tmp_path / "k", WorkerHarness(script, agent="agent_program"), ROWS, resume=True)
    assert not any(i.kind is IncidentKind.RESTARTED for t in again for i in t.output.incidents)
    assert [t.output.failure for t in again] == [None] * len(again)
    sampled = {tuple(s.token_ids.tolist()) for t in again for s in t.output.segments}
    assert kept
    assert all(tuple(decode_completion(record["got"]).token_ids) in sampled for record in kept)
    assert script.num_requests <= NUM_REQUESTS - len(kept)


def test_a_program_with_other_requests_than_recorded_restarts(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "program": "tests.serve.programs:asks_something_else_each_time"}]
    run_journaled(tmp_path / "j", make_harness(1), rows)
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data[: len(data) // 2])
    again = run_journaled(tmp_path / "j", make_harness(2), rows, resume=True)
    assert len(again) == 3
    assert [t.output.failure for t in again] == [None] * 3
    assert again[0].output.incidents[-1].kind is IncidentKind.RESTARTED


QUESTIONS = ["first", "second"]


async def asks_both(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        for question in QUESTIONS:
            await client.chat.completions.create(model="any", messages=user(question))


def test_conversations_that_begin_in_another_order_get_their_own_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"raw_prompt": user("-"), "program": "tests.serve.test_journal:asks_both"}]
    first = run_journaled(tmp_path / "j", make_harness(1), rows)
    payloads = read_records((tmp_path / "j").read_bytes())[0]
    kept = [p for p in payloads if unpack(p)["is"] not in (RecordKind.END, RecordKind.COMPLETE)]
    (tmp_path / "j").write_bytes(HEADER + b"".join(map(framed, kept)))
    monkeypatch.setattr(sys.modules["tests.serve.test_journal"], "QUESTIONS", QUESTIONS[::-1])
    script = RandomScript(seed=2)
    again = run_journaled(tmp_path / "j", WorkerHarness(script, agent="agent_program"), rows, resume=True)
    assert script.num_requests == 0
    assert [facts(t)[3:] for t in again] == [facts(t)[3:] for t in reversed(first)]
