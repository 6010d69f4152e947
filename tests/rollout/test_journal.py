"""Journals: resumed rollouts with exactly the recorded tokens, and files that are read back or found to be damaged."""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from agent_loop.chat.multimodal import Encoded
from agent_loop.config import MultiTurnConfig
from agent_loop.errors import JournalError
from agent_loop.interactions.base import Reply
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import digest, pack, unpack
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.journal import HEADER, JournalFolder, JournalWriter, open_journal, read_records
from agent_loop.runtime.instances import OnReplay
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Trajectory
from agent_loop.trajectory.codec import decode_completion, from_plain
from agent_loop.types import Origin, Row, StopReason
from tests.harness import examples
from tests.helpers import text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness, error_of, kinds, replies
from tests.rollout.journaled import (
    RandomScript,
    Rows,
    cut_after,
    ends_of_records,
    facts,
    journal_of,
    key_of,
    records_of,
    run_journaled,
)


@register("thinks_twice")
class ThinksTwice(AgentLoopBase):
    """User loop with two branches from one turn, and tool calls before and in a branch."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
            thought = await episode.generate(sampling_params)
            await episode.call_tools(thought.parsed.tool_calls)
            await episode.observe(user("go on"))
            async with episode.branch() as other:
                second = await other.generate(sampling_params)
                results = await other.call_tools(second.parsed.tool_calls)
                await other.observe([{"role": "tool", "content": r.response.text} for r in results])
                await other.generate(sampling_params)
                await other.finish()
            await episode.generate(sampling_params)
            await episode.finish()
            return [episode.output(), other.output(extra_fields={"branched": True})]


ROWS = [
    {"raw_prompt": user("question one")},
    {"raw_prompt": user("a second question"), "interaction_kwargs": {"name": "critic"}},
    {"raw_prompt": user("the third"), "agent_name": "thinks_twice"},
    {"raw_prompt": user("the fourth and last of them")},
]


def make_harness(
    seed: int, *, on_replay: OnReplay = OnReplay.RERUN, **options: Any
) -> tuple[WorkerHarness, Adder]:
    tool = Adder({"latency_s": 0.3, "reward": 0.25})
    tool.on_replay = on_replay
    critic = ScriptedInteraction([Reply("No.", score=0.5), "Still no."], name="critic")
    harness = WorkerHarness(
        RandomScript(seed=seed, per_turn=2),
        tools=[tool],
        interactions={"critic": critic},
        multi_turn=MultiTurnConfig(max_parallel_calls=2),
        reward=RewardFunction(lambda output, row: {"reward": 1.0, "asked": row["raw_prompt"]}, timeout_s=1),
        **options,
    )
    return harness, tool


@cache
def first_run() -> tuple[bytes, list[Trajectory]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        trajectories = run_journaled(path, make_harness(1)[0], ROWS)
        return path.read_bytes(), trajectories


ENCODED = (RecordKind.PROMPT, RecordKind.OBSERVATION)


def tokens_on_record(records: list[dict[str, Any]], row: str, lane: int) -> list[tuple[int, bool, float]]:
    """Return token, mask and log-prob of each recorded token."""
    found: list[tuple[int, bool, float]] = []
    for record in records:
        if record.get("row") != row or "at" not in record or record["got"] is None:
            continue
        if record["is"] == RecordKind.BRANCH and record["at"][0] == lane:
            found += tokens_on_record(records[: records.index(record)], row, record["got"]["parent"])
        elif record["is"] == RecordKind.COMPLETION and record["at"][0] == lane:
            output = decode_completion(record["got"])
            assert output.log_probs is not None
            found += zip(output.token_ids, [True] * len(output.token_ids), output.log_probs, strict=True)
        elif record["is"] in ENCODED and record["at"][0] == lane:
            encoded = from_plain(record["got"], Encoded)
            found += [(int(token), False, 0.0) for token in encoded.token_ids]
    return found


def tokens_of(trajectory: Trajectory) -> Iterator[tuple[int, bool, float]]:
    for segment in trajectory.output.segments:
        values = [0.0] * len(segment) if segment.logprobs is None else segment.logprobs.tolist()
        sampled = [segment.origin is Origin.MODEL] * len(segment)
        yield from zip(segment.token_ids.tolist(), sampled, values, strict=True)


def assert_resumes(data: bytes, *, on_replay: OnReplay) -> None:
    """Resume a cut journal with a model that samples other tokens, and check that recorded tokens are kept."""
    whole, before = first_run()
    records = records_of(data)
    ended = {record["row"] for record in records if record["is"] == RecordKind.END}
    harness, tool = make_harness(2, on_replay=on_replay)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        path.write_bytes(data)
        after = run_journaled(path, harness, ROWS, resume=True)
        kept = records_of(path.read_bytes())
        again = run_journaled(path, make_harness(3)[0], ROWS, resume=True)
    assert [t.trajectory_id for t in after] == [t.trajectory_id for t in before]
    assert [facts(t) for t in again] == [facts(t) for t in after]
    assert len(kept) > len(records) or data == whole
    for old, new in zip(before, after, strict=True):
        row, lane = f"group={old.group}/rollout={old.rollout}", old.branch or 0
        prefix = tokens_on_record(records, row, lane)
        assert list(tokens_of(old))[: len(prefix)] == prefix
        assert list(tokens_of(new))[: len(prefix)] == prefix
        assert new.output.stop_reason is old.output.stop_reason
        assert not new.output.incidents
        if row in ended:
            assert facts(new) == facts(old)
    if len(ended) == len(ROWS):
        assert harness.server.requests == []
        assert tool.executed == []


@examples(40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), on_replay=st.sampled_from([OnReplay.RERUN, OnReplay.RECORDED]))
def test_a_journal_cut_at_any_byte_keeps_its_tokens(data: st.DataObject, on_replay: OnReplay) -> None:
    whole, _ = first_run()
    assert_resumes(whole[: data.draw(st.integers(0, len(whole)), label="cut")], on_replay=on_replay)


def test_a_rollout_cut_between_any_two_records_samples_only_the_missing_turns(tmp_path: Path) -> None:
    rows, path = ROWS[:1], tmp_path / "j"
    run_journaled(path, make_harness(1)[0], rows)
    data = path.read_bytes()
    for end in list(ends_of_records(data))[1:-1]:
        path.write_bytes(data[:end])
        seen = Counter(record["is"] for record in records_of(data[:end]))
        harness, tool = make_harness(2, on_replay=OnReplay.RECORDED)
        [trajectory] = run_journaled(path, harness, rows, resume=True)
        assert len(harness.server.requests) == 3 - seen[RecordKind.COMPLETION]
        assert len(tool.executed) == 4 - seen[RecordKind.CALL_ENDED]
        assert trajectory.output.num_assistant_turns == 3
        assert trajectory.output.tool_rewards == (0.25,) * 4
        assert not trajectory.output.incidents


Cut = tuple[RecordKind, int]
"""Kind of the last record that is kept, and which of that kind it is."""


def resumed(path: Path, make: Callable[[int], WorkerHarness], row: Row, cut: Cut) -> Trajectory:
    """Run one row on a worker of seed 1, cut its journal after a record, and resume it on a worker of seed 2."""
    run_journaled(path, make(1), [row])
    path.write_bytes(cut_after(path.read_bytes(), cut[0], count=cut[1]))
    [trajectory] = run_journaled(path, make(2), [row], resume=True)
    return trajectory


def interrupted(
    path: Path, *, on_replay: OnReplay, cut: Cut, row: Row = ROWS[0]
) -> tuple[Trajectory, Adder, WorkerHarness]:
    """Interrupt and resume a row whose turns call a tool twice."""
    made: list[tuple[WorkerHarness, Adder]] = []

    def make(seed: int) -> WorkerHarness:
        made.append(make_harness(seed, on_replay=on_replay))
        return made[-1][0]

    trajectory = resumed(path, make, row, cut)
    harness, tool = made[-1]
    return trajectory, tool, harness


def test_a_row_restarts_with_an_incident_if_its_tool_does_not_allow_a_replay(tmp_path: Path) -> None:
    cut = (RecordKind.CALL_ENDED, 3)
    trajectory, tool, harness = interrupted(tmp_path / "j", on_replay=OnReplay.RESTART, cut=cut)
    assert len(harness.server.requests) == 3
    assert len(tool.executed) == 4
    [incident] = trajectory.output.incidents
    assert incident.kind is IncidentKind.RESTARTED
    assert "tool 'add' was used before, and its on_replay does not allow a replay" in incident.detail


def test_a_row_restarts_if_a_call_that_cannot_be_repeated_was_interrupted(tmp_path: Path) -> None:
    cut = (RecordKind.CALL_BEGAN, 1)
    trajectory, tool, _ = interrupted(tmp_path / "j", on_replay=OnReplay.RESTART, cut=cut)
    assert kinds(trajectory) == [IncidentKind.RESTARTED]
    assert len(tool.executed) == 4


def test_the_reply_to_an_interrupted_once_only_call_states_that_its_effect_is_unknown(tmp_path: Path) -> None:
    cut = (RecordKind.CALL_BEGAN, 2)
    trajectory, tool, _ = interrupted(tmp_path / "j", on_replay=OnReplay.ONCE, cut=cut)
    assert kinds(trajectory) == [IncidentKind.INTERRUPTED_CALL] * 2
    assert len(tool.executed) == 2
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert "may or may not have taken effect" in replies(trajectory)[0]


def test_the_state_of_tools_is_restored_by_repeating_their_calls(tmp_path: Path) -> None:
    class Counting(Adder):
        on_replay = OnReplay.RERUN

        def __init__(self) -> None:
            super().__init__()
            self.counts: Counter[str] = Counter()

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            _, reward, extra = await super().execute(instance_id, parameters)
            self.counts[instance_id] += 1
            return f"call {self.counts[instance_id]}", reward, extra

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            return float(self.counts[instance_id])

    def make(seed: int) -> WorkerHarness:
        return WorkerHarness(RandomScript(seed=seed, num_calls=4), tools=[Counting()])

    trajectory = resumed(tmp_path / "j", make, ROWS[0], (RecordKind.OBSERVATION, 2))
    assert replies(trajectory) == ["call 1", "call 2", "call 3", "call 4"]
    assert trajectory.reward == 4.0


fickle_words = iter("abcdefghij")


@register("fickle")
class Fickle(AgentLoopBase):
    """Loop that sends a different user message on every run."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
            first = await episode.generate(sampling_params)
            await episode.call_tools(first.parsed.tool_calls)
            await episode.observe(user(next(fickle_words)))
            try:
                await episode.generate(sampling_params)
            except Exception:  # a careless loop ignores all errors
                await episode.generate(sampling_params)
            await episode.finish()
            return episode.output()


FICKLE = {"raw_prompt": user("?"), "agent_name": "fickle"}


def test_a_loop_with_other_requests_than_recorded_restarts_its_row_with_an_incident(tmp_path: Path) -> None:
    cut = (RecordKind.COMPLETION, 2)
    trajectory, *_ = interrupted(tmp_path / "j", on_replay=OnReplay.RECORDED, cut=cut, row=FICKLE)
    [incident] = trajectory.output.incidents
    assert incident.kind is IncidentKind.RESTARTED
    assert "turn 3 of episode 0 requests another observation than the recorded" in incident.detail
    assert trajectory.output.stop_reason is StopReason.ANSWERED


def test_a_row_fails_if_its_restart_would_run_a_tool_twice(tmp_path: Path) -> None:
    cut = (RecordKind.COMPLETION, 2)
    trajectory, tool, _ = interrupted(tmp_path / "j", on_replay=OnReplay.ONCE, cut=cut, row=FICKLE)
    assert trajectory.output.stop_reason is StopReason.FAILED
    assert "tool 'add' was used, or may have been, and may be used only once" in error_of(trajectory)
    assert tool.executed == []


def test_a_failed_row_of_an_unfinished_rollout_is_retried_from_its_last_turn(tmp_path: Path) -> None:
    path, tool = tmp_path / "j", Adder()
    tool.on_replay = OnReplay.RECORDED
    script = [tool_call_reply("add", a=1, b=2), ScriptedReply([1], error="engine hiccup")]
    [failed] = run_journaled(path, WorkerHarness(script, tools=[tool]), ROWS[:1])
    assert failed.output.stop_reason is StopReason.FAILED
    path.write_bytes(cut_after(path.read_bytes(), RecordKind.END))
    harness = WorkerHarness(lambda _: text_reply("3"), tools=[tool])
    [retried] = run_journaled(path, harness, ROWS[:1], resume=True)
    assert retried.output.answer == "3"
    assert len(tool.executed) == 1
    [again] = run_journaled(path, WorkerHarness([]), ROWS[:1], resume=True)
    assert facts(again) == facts(retried)


def test_a_result_that_cannot_be_packed_is_recorded_as_text_and_its_row_is_resumed(tmp_path: Path) -> None:
    class Odd(Adder):
        on_replay = OnReplay.RECORDED

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "fine", None, {"handle": object()}

    def make(seed: int) -> WorkerHarness:
        return WorkerHarness(RandomScript(seed=seed), tools=[Odd()])

    trajectory = resumed(tmp_path / "j", make, ROWS[0], (RecordKind.OBSERVATION, 1))
    assert trajectory.output.feedback[0].extra == {"handle": "<object object>"}
    assert IncidentKind.RESTARTED not in kinds(trajectory)


@pytest.mark.parametrize("num_calls", [5, 50])
def test_the_journal_grows_with_the_tokens_and_not_with_their_square(tmp_path: Path, num_calls: int) -> None:
    path, tool = tmp_path / "j", Adder()
    tool.on_replay = OnReplay.RECORDED
    script = RandomScript(seed=1, num_calls=num_calls)
    [trajectory] = run_journaled(path, WorkerHarness(script, tools=[tool], response_length=100_000), ROWS[:1])
    per_token = path.stat().st_size / sum(map(len, trajectory.output.segments))
    assert trajectory.output.num_assistant_turns == num_calls + 1
    assert 13 < per_token < 32  # the ids and log-probs alone are 4 to 8, in the turns and in the result


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@examples(100)
@given(plain)
def test_any_plain_value_is_unpacked_as_it_was_packed(value: Any) -> None:
    assert unpack(pack(value)) == value
    assert digest([value]) == digest([unpack(pack(value))])


def test_arrays_and_images_are_unpacked_unchanged_and_lone_surrogates_are_replaced() -> None:
    image = Image.effect_noise((5, 7), 40)
    value = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": [np.float32(0.5), image], "c": "\ud800"}
    back = unpack(pack(value))
    assert back["a"].dtype == np.int32
    assert (back["a"] == value["a"]).all()
    assert back["b"][0] == 0.5
    assert back["b"][1].tobytes() == image.tobytes()
    assert back["c"] == "\ufffd"


payload_lists = st.lists(st.binary(max_size=30), max_size=5)


@settings(deadline=None)
@given(payload_lists, st.data())
def test_the_complete_records_of_any_prefix_are_read(payloads: list[bytes], data: st.DataObject) -> None:
    whole = journal_of(payloads)
    cut = data.draw(st.integers(0, len(whole)))
    found, num_bytes = read_records(whole[:cut])
    assert found == payloads[: len(found)]
    assert num_bytes == (len(journal_of(found)) if cut >= len(HEADER) else 0)
    assert len(journal_of(payloads[: len(found) + 1])) > cut or cut == len(whole)


@settings(deadline=None)
@given(payload_lists.filter(bool), st.data())
def test_a_changed_byte_is_detected_and_its_record_named(payloads: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(journal_of(payloads))
    place = data.draw(st.integers(len(HEADER), len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    ends = [len(journal_of(payloads[:count])) for count in range(len(payloads) + 1)]
    start = max(end for end in ends if end <= place)
    with pytest.raises(JournalError, match=f"is damaged at byte {start};"):
        read_records(bytes(whole))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"something else entirely, and long enough to be anything", "is not a journal"),
        (lambda data: HEADER[:28] + b"\x09\0\0\0" + data[len(HEADER) :], "has format 9"),
        (lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:], "the journal is damaged at byte"),
    ],
)
def test_a_damaged_file_is_kept(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path, data = tmp_path / "j", damage(first_run()[0])
    path.write_bytes(data)
    with pytest.raises(JournalError, match=rf"the journal '.*/j' cannot be read: .*{message}"):
        run_journaled(path, make_harness(2)[0], ROWS, resume=True)
    assert path.read_bytes() == data


def test_a_once_only_call_is_on_disk_when_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, on_disk = tmp_path / "j", list[int]()

    def sync(file: int) -> None:
        records = records_of(path.read_bytes())
        on_disk.append(sum(record["is"] == RecordKind.CALL_BEGAN for record in records))

    monkeypatch.setattr(os, "fsync", sync)

    class Watching(Adder):
        on_replay = OnReplay.ONCE

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            assert on_disk
            assert on_disk[-1] > len(self.executed)
            return await super().execute(instance_id, parameters, **kwargs)

    harness = WorkerHarness(RandomScript(seed=1, num_calls=2), tools=[Watching()])
    trajectories = run_journaled(path, harness, ROWS[:1])
    assert {t.output.stop_reason for t in trajectories} == {StopReason.ANSWERED}


async def note_of(path: Path, rows: Rows, *, refuse: bool = False, **settings: Any) -> str:
    """Resume a journal, and return its note."""
    key = key_of(rows, **settings)
    async with open_journal(path, key=key, rows=rows, resume=True, refuse=refuse) as journal:
        return journal.note


@pytest.mark.virtual_time
async def test_an_empty_journal_is_reported(tmp_path: Path) -> None:
    (tmp_path / "j").touch()
    assert "has no records; the rollout starts from the beginning" in await note_of(tmp_path / "j", ROWS)


@pytest.mark.virtual_time
async def test_a_journal_of_another_rollout_is_refused_or_replaced_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "j"
    await note_of(path, [{"raw_prompt": user("?")}], rollout={"temperature": 1.0})
    changed: dict[str, Any] = {"rows": [{"raw_prompt": user("!")}], "rollout": {"temperature": 0.5}}
    message = r"belongs to another rollout: rollout\.temperature, rows changed"
    with pytest.raises(JournalError, match=message):
        await note_of(path, refuse=True, **changed)
    note = await note_of(path, **changed)
    assert "rollout.temperature, rows changed; the journal is not used" in note
    assert not await note_of(path, **changed)


def test_a_full_disk_stops_the_rollout_with_an_error_and_leaves_an_intact_journal(tmp_path: Path) -> None:
    path, (harness, tool) = tmp_path / "j", make_harness(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))  # bytes of a file
    try:
        with pytest.raises(JournalError, match=r"cannot be written .*rollout.journal=false"):
            run_journaled(path, harness, ROWS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tool.open == set()
    assert harness.server.num_running == harness.server.num_sessions == 0
    assert read_records(path.read_bytes())[1] == path.stat().st_size
    assert len(run_journaled(path, make_harness(2)[0], ROWS, resume=True)) == 5


async def test_flushed_records_are_in_the_file_and_in_order(tmp_path: Path) -> None:
    async with JournalWriter(tmp_path / "j") as writer:
        for number in range(200):
            writer.append(pack(number))
            if number % 7 == 0:
                await asyncio.sleep(0)
        await writer.flushed()
        assert [unpack(each) for each in read_records((tmp_path / "j").read_bytes())[0]] == list(range(200))


def test_journals_up_to_a_step_or_after_a_step_are_deleted(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    folder.path.mkdir()
    for step in (3, 4, 5, 6):
        folder.file(step).touch()
    folder.drop_through(3)
    assert folder.drop_after(5) == [6]
    assert sorted(folder.path.iterdir()) == [folder.file(4), folder.file(5)]
