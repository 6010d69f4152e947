"""Tests of stored responses, and of responses in the background, in a session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import unpack
from agent_loop.rollout.journal.frames import HEADER, framed, scan
from agent_loop.types import StopReason
from tests.gateway.harness import MODEL, ProgramHarness, in_order, origins
from tests.gateway.test_responses import client_of, run_one
from tests.helpers import text_reply, user
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import RandomScript, facts, run_journaled


async def ended(responses: Any, response_id: str) -> Any:
    """Retrieve a response until it is no longer in progress."""
    while True:
        response = await responses.retrieve(response_id)
        if response.status != "in_progress":
            return response
        await asyncio.sleep(0.1)


def test_a_response_in_the_background_is_retrieved_and_continued() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        started = await responses.create(model=MODEL, input="?", background=True, metadata={"k": "v"})
        assert (started.status, started.output, started.background) == ("in_progress", [], True)
        with pytest.raises(openai.BadRequestError, match="cannot be continued"):
            await responses.create(model=MODEL, input="?", previous_response_id=started.id)
        response = await ended(responses, started.id)
        assert (response.status, response.output_text, response.metadata) == ("completed", "x", {"k": "v"})
        await responses.create(model=MODEL, input="more", previous_response_id=started.id)

    [trajectory] = ProgramHarness(in_order(text_reply("x", latency_s=1), text_reply("y"))).run_virtual(
        program
    )
    assert trajectory.output.failure is None
    assert origins(trajectory.output) == ["prompt", "model", "interaction", "model"]


def test_a_cancelled_response_is_aborted_on_the_server_and_its_tokens_are_kept() -> None:
    harness = ProgramHarness(in_order(text_reply("one two three four", latency_s=100)))

    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        started = await responses.create(model=MODEL, input="?", background=True)
        await asyncio.sleep(50)
        assert harness.server.num_running == 1
        cancelled = await responses.cancel(started.id)
        assert (cancelled.status, cancelled.id) == ("cancelled", started.id)
        assert (await responses.cancel(started.id)).status == "cancelled"
        assert (await responses.retrieve(started.id)).status == "cancelled"

    [trajectory] = harness.run_virtual(program)
    assert trajectory.output.failure is None
    assert trajectory.output.stop_reason is StopReason.CANCELLED


def test_a_failure_in_the_background_is_the_status_of_the_response() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        started = await responses.create(model=MODEL, input="?", background=True)
        failed = await ended(responses, started.id)
        assert failed.status == "failed"
        assert failed.error.code == "deadline"

    harness = ProgramHarness(in_order(text_reply("one two", latency_s=9)), generate_timeout_s=5)
    [trajectory] = harness.run_virtual(program)
    assert trajectory.output.failure is None


def test_a_session_that_ends_aborts_its_responses_in_the_background() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        await responses.create(model=MODEL, input="?", background=True)

    [trajectory] = ProgramHarness(in_order(text_reply("one two", latency_s=100))).run_virtual(program)
    assert trajectory.output.failure is None


def test_stored_responses_are_retrieved_listed_and_deleted() -> None:
    async def program(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        first = await responses.create(model=MODEL, input=[*user("one"), *user("two")])
        second = await responses.create(model=MODEL, input="three", previous_response_id=first.id)
        assert await responses.retrieve(first.id) == first
        listed = [item async for item in responses.input_items.list(second.id, order="asc", limit=2)]
        assert [item.role for item in listed] == ["user", "user", "assistant", "user"]
        page = await responses.input_items.list(second.id, limit=3)
        assert (page.data[0].content, page.has_more) == ("three", True)
        named = [{"type": "item_reference", "id": item.id} for item in listed]
        third = await responses.create(model=MODEL, input=[*named, *second.output, *user("four")])
        assert third.output_text == "z"
        await responses.delete(first.id)
        for call in (responses.retrieve, responses.delete, responses.cancel, responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await call(first.id)
        await responses.create(model=MODEL, input="five", previous_response_id=third.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await responses.cancel(third.id)
        with pytest.raises(openai.BadRequestError, match="stream"):
            await responses.retrieve(third.id, stream=True)

    output = run_one(program, "x", "y", "z", "end")
    expected = ["prompt", "model", *["interaction", "model"] * 3]
    assert origins(output) == expected


def test_sessions_do_not_see_each_others_responses() -> None:
    ids: list[str] = []
    is_stored = asyncio.Event()

    async def writer(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        ids.append((await responses.create(model=MODEL, input="?")).id)
        is_stored.set()

    async def reader(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
        responses = client_of(base_url, api_key, http_client).responses
        await is_stored.wait()
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(ids[0])
        await responses.create(model=MODEL, input="?")

    trajectories = ProgramHarness(in_order(text_reply("x"))).run_virtual(writer, reader)
    assert [trajectory.output.failure for trajectory in trajectories] == [None, None]


async def continues_stored_responses(row: Any, *, base_url: str, api_key: str, http_client: Any) -> None:
    responses = client_of(base_url, api_key, http_client).responses
    first = await responses.create(model=MODEL, input="one")
    await responses.create(model=MODEL, input="two", previous_response_id=first.id)
    other = await responses.create(
        model=MODEL, input="two again", previous_response_id=first.id, background=True
    )
    assert (await ended(responses, other.id)).status in ("completed", "incomplete")


def test_a_program_that_runs_again_gets_its_recorded_completions(tmp_path: Path) -> None:
    rows = [{"raw_prompt": user("-"), "program": f"{__name__}:continues_stored_responses"}]
    first = run_journaled(tmp_path / "j", WorkerHarness(RandomScript(seed=1), agent="agent_program"), rows)
    payloads = scan((tmp_path / "j").read_bytes()).payloads
    kept = [p for p in payloads if unpack(p)["is"] not in (RecordKind.END, RecordKind.COMPLETE)]
    (tmp_path / "j").write_bytes(HEADER + b"".join(map(framed, kept)))
    script = RandomScript(seed=2)
    again = run_journaled(tmp_path / "j", WorkerHarness(script, agent="agent_program"), rows, resume=True)
    assert script.num_requests == 0
    assert len(first) == 2
    assert [facts(trajectory) for trajectory in again] == [facts(trajectory) for trajectory in first]
