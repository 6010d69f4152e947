"""The journal file: records are read back as written, and damage is detected."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from agent_loop.errors import JournalError
from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import digest, pack, unpack
from agent_loop.rollout.journal import (
    HEADER,
    JournalFolder,
    JournalWriter,
    open_journal,
    read_records,
)
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import StopReason
from tests.harness import examples
from tests.helpers import user
from tests.rollout.harness import Adder, WorkerHarness
from tests.rollout.journaled import RandomScript, Rows, journal_of, key_of, records_of, run_journaled
from tests.rollout.test_journal_replay import ROWS, facts, first_run, make_harness

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
def test_a_changed_byte_is_detected_and_its_record_is_named(
    payloads: list[bytes], data: st.DataObject
) -> None:
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
def test_a_damaged_journal_is_named_and_not_changed(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path, data = tmp_path / "j", damage(first_run()[0])
    path.write_bytes(data)
    with pytest.raises(JournalError, match=rf"the journal '.*/j' cannot be read: .*{message}"):
        run_journaled(path, make_harness(2)[0], ROWS, resume=True)
    assert path.read_bytes() == data


def test_a_once_only_call_starts_after_its_record_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_complete_rollout_is_read_without_running_anything(tmp_path: Path) -> None:
    whole, before = first_run()
    (tmp_path / "j").write_bytes(whole)
    harness, _ = make_harness(2)
    after = run_journaled(tmp_path / "j", harness, ROWS, resume=True)
    assert [facts(t) for t in after] == [facts(t) for t in before]
    assert harness.server.requests == []


def test_journals_up_to_a_step_or_after_a_step_are_deleted(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path)
    folder.path.mkdir()
    for step in (3, 4, 5, 6):
        folder.file(step).touch()
    folder.drop_through(3)
    assert folder.drop_after(5) == [6]
    assert sorted(folder.path.iterdir()) == [folder.file(4), folder.file(5)]
