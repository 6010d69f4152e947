"""Tests that an interrupted program runs again and receives the recorded completions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import unpack
from agent_loop.rollout.journal import read_records
from agent_loop.trajectory import IncidentKind
from agent_loop.trajectory.codec import decode_completion
from tests.helpers import user
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import RandomScript, facts, journal_of, records_of, run_journaled
from tests.serve.harness import ADD, client_of


async def leads_three_conversations(row: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
    """Call tools in one conversation, branch at its start, and ask a helper with its own system prompt."""
    client = client_of(base_url, api_key, http_client)
    ask = partial(client.chat.completions.create, model="m", tools=[ADD])
    opening: list[Any] = user(str(row["question"]))
    first = (await ask(messages=opening)).choices[0].message
    messages = [*opening, first]
    reply = first
    while reply.tool_calls:
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in reply.tool_calls]
        reply = (await ask(messages=messages)).choices[0].message
        messages.append(reply)
    helper = [{"role": "system", "content": "help"}, *user(str(reply.content))]
    stream = await ask(messages=helper, stream=True)
    help_given = [chunk.choices[0].delta.content or "" async for chunk in stream]
    answers = [{"role": "tool", "tool_call_id": c.id, "content": "other"} for c in first.tool_calls or ()]
    await ask(messages=[*opening, first, *answers, *user("".join(help_given))])
    return 1.0


async def continues_and_forces(row: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
    """Continue a cut turn, begin a turn with a text, and force a call, each on a branch of its own."""
    client = client_of(base_url, api_key, http_client)
    ask = partial(client.chat.completions.create, model="m", tools=[ADD])
    rest = {"continue_final_message": True}
    opening: list[Any] = user(str(row["question"]))
    first = (await ask(messages=opening, tool_choice="none", max_tokens=2)).choices[0].message
    begun: Any = {"role": "assistant", "content": first.content}
    more = await ask(messages=[*opening, begun], tool_choice="none", extra_body=rest)
    answer = {"role": "assistant", "content": str(first.content) + str(more.choices[0].message.content)}
    next_turn = [*opening, answer, *user("next")]
    await ask(
        messages=[*next_turn, {"role": "assistant", "content": "Well, "}], tool_choice="none", extra_body=rest
    )
    await ask(messages=next_turn, tool_choice="none")
    await ask(messages=[*opening, *user("call")], tool_choice="required")
    return 1.0


async def asks_in_turn(row: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
    """Ask the questions of the run that begins."""
    client = client_of(base_url, api_key, http_client)
    for question in QUESTIONS.pop():
        await client.chat.completions.create(model="m", messages=user(question))
    return 1.0


QUESTIONS: list[list[str]] = []
"""Questions of the runs of `asks_in_turn`, last run first."""


def rows_of(program: Any, *, number: int = 2) -> list[dict[str, Any]]:
    name = f"{__name__}:{program.__name__}"
    return [{"raw_prompt": user("-"), "program": name, "question": "why" * n} for n in range(1, number + 1)]


def make_harness(seed: int, *, per_turn: int = 2) -> tuple[WorkerHarness, RandomScript]:
    script = RandomScript(seed=seed, per_turn=per_turn)
    return WorkerHarness(script, agent="agent_program"), script


def drop_results(path: Path) -> None:
    """Leave the completions in a journal, and remove the trajectories."""
    payloads = read_records(path.read_bytes())[0]
    kept = [p for p in payloads if unpack(p)["is"] not in (RecordKind.END, RecordKind.COMPLETE)]
    path.write_bytes(journal_of(kept))


@pytest.mark.parametrize(
    ("program", "origin"), [(leads_three_conversations, "tool"), (continues_and_forces, "prefix")]
)
def test_trajectories_come_back_and_all_completions_are_replayed_also_on_branches(
    tmp_path: Path, program: Any, origin: str
) -> None:
    journal, rows = tmp_path / "j", rows_of(program)
    first = run_journaled(journal, make_harness(1)[0], rows)
    assert [t.trajectory_id[-8:] for t in first[:3]] == ["branch=0", "branch=1", "branch=2"]
    assert origin in {str(s.origin) for t in first for s in t.output.segments}
    expected = [facts(t) for t in first]
    assert [facts(t) for t in run_journaled(journal, make_harness(2)[0], rows, resume=True)] == expected
    drop_results(journal)
    harness, script = make_harness(3)
    assert [facts(t) for t in run_journaled(journal, harness, rows, resume=True)] == expected
    assert script.num_requests == 0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_completions_from_before_the_crash_are_replayed(tmp_path: Path, share: float) -> None:
    journal, rows = tmp_path / "j", rows_of(leads_three_conversations)
    first, before = make_harness(1)
    run_journaled(journal, first, rows)
    data = journal.read_bytes()
    journal.write_bytes(data[: int(len(data) * share)])
    kept = [r for r in records_of(journal.read_bytes()) if r["is"] == RecordKind.COMPLETION]
    harness, script = make_harness(2)
    again = run_journaled(journal, harness, rows, resume=True)
    assert not any(i.kind is IncidentKind.RESTARTED for t in again for i in t.output.incidents)
    assert [t.output.failure for t in again] == [None] * len(again)
    sampled = {tuple(s.token_ids.tolist()) for t in again for s in t.output.segments}
    assert kept
    assert all(tuple(decode_completion(record["got"]).token_ids) in sampled for record in kept)
    assert script.num_requests <= before.num_requests - len(kept)


def test_a_program_with_other_requests_than_recorded_restarts(tmp_path: Path) -> None:
    rows = rows_of(asks_in_turn, number=1)
    QUESTIONS[:] = [["other", "ones", "now"]] * 2 + [["one", "two", "three"]]
    run_journaled(tmp_path / "j", make_harness(1)[0], rows)
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data[: len(data) // 2])
    again = run_journaled(tmp_path / "j", make_harness(2)[0], rows, resume=True)
    assert [t.output.failure for t in again] == [None] * 3
    assert again[0].output.incidents[-1].kind is IncidentKind.RESTARTED


def test_conversations_that_begin_in_another_order_get_their_own_completions(tmp_path: Path) -> None:
    rows = rows_of(asks_in_turn, number=1)
    QUESTIONS[:] = [["second", "first"], ["first", "second"]]
    first = run_journaled(tmp_path / "j", make_harness(1)[0], rows)
    drop_results(tmp_path / "j")
    harness, script = make_harness(2)
    again = run_journaled(tmp_path / "j", harness, rows, resume=True)
    assert script.num_requests == 0
    assert [facts(t)[3:] for t in again] == [facts(t)[3:] for t in reversed(first)]
