"""Damaged journals: intact records are used, damaged records are kept and reported, and no call runs twice."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given
from hypothesis import strategies as st

from agent_loop.errors import JournalError
from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import pack, unpack
from agent_loop.rollout.journal.file import FRAME_BYTES, HEADER, read_records
from agent_loop.rollout.journal.step import open_journal
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.harness import examples
from tests.helpers import user
from tests.rollout.harness import Adder, WorkerHarness
from tests.rollout.journaled import RandomScript, facts, journal_of, key_of, records_of, run_journaled

ROWS = [{"raw_prompt": user("question one")}, {"raw_prompt": user("a second question")}]


class CountingAdder(Adder):
    """Tool that counts the calls of each row."""

    def __init__(self, on_replay: OnReplay) -> None:
        super().__init__({"latency_s": 0.3, "reward": 0.25})
        self.on_replay = on_replay
        self.calls: Counter[str] = Counter()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.calls[instance_id.rpartition("-")[0]] += 1
        return await super().execute(instance_id, parameters, **kwargs)


def make_harness(seed: int, on_replay: OnReplay) -> tuple[WorkerHarness, CountingAdder]:
    tool = CountingAdder(on_replay)
    return WorkerHarness(RandomScript(seed=seed, num_calls=2), tools=[tool]), tool


@cache
def first_run(on_replay: OnReplay) -> tuple[bytes, list[Trajectory]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        trajectories = run_journaled(path, make_harness(1, on_replay)[0], ROWS)
        return path.read_bytes(), trajectories


def record_starts(data: bytes) -> list[int]:
    """Return the offset of each record, and the end of the last record."""
    starts = [len(HEADER)]
    for payload in read_records(data).payloads:
        starts.append(starts[-1] + FRAME_BYTES + len(payload))
    return starts


def started_calls(records: list[dict[str, Any]]) -> Counter[str]:
    return Counter(record["row"] for record in records if record["is"] == RecordKind.CALL_BEGAN)


def resumed(
    data: bytes, *, on_replay: OnReplay, refuse: bool = False
) -> tuple[list[Trajectory], CountingAdder, dict[str, bytes]]:
    """Resume a rollout from a journal. Return its trajectories, its tool and the files that it leaves."""
    harness, tool = make_harness(2, on_replay)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "j").write_bytes(data)
        after = run_journaled(Path(folder) / "j", harness, ROWS, resume=True, refuse=refuse)
        return after, tool, {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def cut_off(data: bytes, share: float) -> bytes:
    """Return the journal of a run that was killed after a share of the records. All its records are complete."""
    starts = record_starts(data)
    return data[: starts[max(2, int(share * (len(starts) - 1)))]]


CHANGES = st.tuples(
    st.sampled_from(["flip", "zeros", "double", "leave out"]),
    st.floats(0, 1),
    st.integers(1, 255),
    st.floats(0, 1),
)


def damaged(data: bytes, change: str, place: int, mask: int, size: int) -> bytes:
    end = min(len(data), place + size)
    if change == "flip":
        return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]
    if change == "zeros":
        return data[:place] + bytes(end - place) + data[end:]
    if change == "double":
        return data[:end] + data[place:end] + data[end:]
    return data[:place] + data[end:]


@examples(60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(kill=st.floats(0, 1), change=CHANGES)
@example(kill=0.5, change=("flip", 0.02, 1, 0.0))
@example(kill=0.5, change=("zeros", 0.95, 1, 1.0))
def test_no_damage_to_a_journal_makes_a_call_run_twice_or_breaks_the_rollout(
    kill: float, change: tuple[str, float, int, float]
) -> None:
    whole, before = first_run(OnReplay.ONCE)
    data = cut_off(whole, kill)
    kind, share, mask, length = change
    place = int(share * (len(data) - 1))
    wrong = damaged(data, kind, place, mask, 1 + int(length * 300))
    begun = started_calls(records_of(data))
    if place < len(HEADER):
        with suppress(JournalError):
            resumed(wrong, on_replay=OnReplay.ONCE)
        return
    after, tool, files = resumed(wrong, on_replay=OnReplay.ONCE)
    assert [t.trajectory_id for t in after] == [t.trajectory_id for t in before]
    for trajectory in after:
        if trajectory.output.failure is not None:
            assert "tool 'add' may have been used before: the journal" in trajectory.output.failure.error
    if read_records(wrong).is_damaged:  # without damage, it is the journal of a killed run
        for row in (t.trajectory_id for t in after):
            assert begun[row] + tool.calls[row] <= 2
    again, tool, _ = resumed(files["j"], on_replay=OnReplay.ONCE)
    assert not tool.calls
    failed = [t.trajectory_id for t in after if t.output.failure is not None]
    assert [t.trajectory_id for t in again if t.output.failure is not None] == failed


@pytest.mark.parametrize("number", range(1, 24, 4))
def test_records_before_the_damage_are_used_and_the_file_is_kept(number: int) -> None:
    whole, before = first_run(OnReplay.ONCE)
    starts = record_starts(whole)
    data = bytearray(whole)
    data[starts[number] + FRAME_BYTES + 5] ^= 1
    after, tool, files = resumed(bytes(data), on_replay=OnReplay.ONCE)
    assert files["j.damaged-1"] == data
    assert files["j"][: starts[number]] == whole[: starts[number]]
    assert tool.executed == []
    ended = {r["row"] for r in records_of(whole[: starts[number]]) if r["is"] == RecordKind.END}
    for old, new in zip(before, after, strict=True):
        if f"group={old.group}/rollout={old.rollout}" in ended:
            assert facts(new) == facts(old)
        elif new.output.failure is not None:
            assert f"was damaged at byte {starts[number]}" in new.output.failure.error
            assert "j.damaged-1" in new.output.failure.error


def test_an_explicit_resume_is_refused_and_changes_nothing_if_the_first_record_is_damaged(
    tmp_path: Path,
) -> None:
    whole, _ = first_run(OnReplay.ONCE)
    data, path = bytearray(whole), tmp_path / "j"
    data[len(HEADER) + FRAME_BYTES + 20] ^= 4
    path.write_bytes(data)
    with pytest.raises(JournalError, match="damaged at byte 32"):
        run_journaled(path, make_harness(2, OnReplay.ONCE)[0], ROWS, resume=True, refuse=True)
    assert path.read_bytes() == data
    assert not list(tmp_path.glob("j.damaged-*"))


def test_a_training_step_restarts_without_repeating_once_only_calls_if_the_first_record_is_damaged() -> None:
    whole, _ = first_run(OnReplay.ONCE)
    data = bytearray(whole)
    data[len(HEADER) + FRAME_BYTES + 20] ^= 4
    after, tool, files = resumed(bytes(data), on_replay=OnReplay.ONCE)
    assert files["j.damaged-1"] == data
    assert {t.output.stop_reason for t in after} == {StopReason.FAILED}
    assert tool.executed == []
    harmless, tool, _ = resumed(bytes(data), on_replay=OnReplay.RECORDED)
    assert {t.output.stop_reason for t in harmless} == {StopReason.ANSWERED}
    assert len(tool.executed) == 4


def test_rows_whose_calls_can_be_repeated_resume_from_a_damaged_journal() -> None:
    whole, before = first_run(OnReplay.RECORDED)
    starts = record_starts(whole)
    for number in range(1, len(starts) - 1, 3):
        data = bytearray(whole)
        data[starts[number] + FRAME_BYTES] ^= 1
        after, _, _ = resumed(bytes(data), on_replay=OnReplay.RECORDED)
        assert [t.output.stop_reason for t in after] == [t.output.stop_reason for t in before]
        assert all(t.output.num_assistant_turns == 3 and not t.output.incidents for t in after)


def test_each_damage_is_kept_in_a_file_of_its_own(tmp_path: Path) -> None:
    whole, _ = first_run(OnReplay.RECORDED)
    path = tmp_path / "j"
    path.write_bytes(whole)
    for _ in range(2):
        data = bytearray(path.read_bytes())
        data[record_starts(data)[1] + FRAME_BYTES] ^= 1
        path.write_bytes(data)
        run_journaled(path, make_harness(2, OnReplay.RECORDED)[0], ROWS, resume=True)
    assert len(list(tmp_path.glob("j.damaged-*"))) == 2


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    key = unpack(read_records(first_run(OnReplay.ONCE)[0]).payloads[0])
    for payload in (
        b"no record at all",
        pack({"is": "unknown"}),
        pack({"is": "end"}),
        pack({**key, "got": {"step": 1}}),
        pack([1]),
    ):
        path.write_bytes(journal_of([payload]))
        with pytest.raises(JournalError, match="cannot be read by this version of agent-loop"):
            run_journaled(path, make_harness(2, OnReplay.ONCE)[0], ROWS, resume=True)


def test_an_empty_journal_is_reported(tmp_path: Path) -> None:
    (tmp_path / "j").touch()

    async def notes() -> list[str]:
        async with open_journal(tmp_path / "j", key=key_of(ROWS), rows=ROWS, resume=True) as journal:
            return list(journal.notes)

    [note] = run_virtual(notes())
    assert "has no records; the rollout starts from the beginning" in note


def test_a_once_only_call_starts_after_its_record_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, on_disk = tmp_path / "j", list[int]()

    def sync(file: int) -> None:
        on_disk.append(started_calls(records_of(path.read_bytes())).total())

    monkeypatch.setattr(os, "fsync", sync)

    class Watching(Adder):
        on_replay = OnReplay.ONCE

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            num_executed = len(self.executed)
            assert on_disk
            assert on_disk[-1] > num_executed
            return await super().execute(instance_id, parameters, **kwargs)

    harness = WorkerHarness(RandomScript(seed=1, num_calls=2), tools=[Watching()])
    trajectories = run_journaled(path, harness, ROWS)
    assert {t.output.stop_reason for t in trajectories} == {StopReason.ANSWERED}
