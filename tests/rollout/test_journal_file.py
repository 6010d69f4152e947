"""The journal file: records are read back as written, and damage is detected."""

from __future__ import annotations

import asyncio
import os
import resource
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
    StepKey,
    open_journal,
    read_records,
)
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.types import StopReason
from tests.harness import examples
from tests.helpers import user
from tests.rollout.harness import Adder, WorkerHarness
from tests.rollout.journaled import RandomScript, journal_of, key_of, records_of, run_journaled
from tests.rollout.test_journal_replay import ROWS, facts, first_run, make_harness

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
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


def test_a_file_that_is_not_a_journal_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"something else entirely, and long enough to be anything")
    with pytest.raises(JournalError, match="is not a journal"):
        run_journaled(path, make_harness(1)[0], ROWS, resume=True)
    assert path.read_bytes().startswith(b"something else")


def test_a_damaged_journal_is_named_and_not_changed(tmp_path: Path) -> None:
    data, path = bytearray(first_run()[0]), tmp_path / "j"
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        JournalError, match=r"the journal '.*/j' cannot be read: the journal is damaged at byte"
    ):
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


def test_an_empty_journal_is_reported(tmp_path: Path) -> None:
    (tmp_path / "j").touch()

    async def note() -> str:
        async with open_journal(tmp_path / "j", key=key_of(ROWS), rows=ROWS, resume=True) as journal:
            return journal.note

    assert "has no records; the rollout starts from the beginning" in run_virtual(note())


def test_a_journal_of_another_format_is_refused() -> None:
    with pytest.raises(JournalError, match="has format 9"):
        read_records(HEADER[:28] + b"\x09\0\0\0")


@pytest.mark.parametrize("refuse", [True, False])
def test_a_journal_of_another_rollout_is_refused_or_replaced_with_a_note(
    tmp_path: Path, refuse: bool
) -> None:
    path, rows = tmp_path / "j", [{"raw_prompt": user("?")}]

    async def scenario(key: StepKey, of: Any) -> str:
        async with open_journal(path, key=key, rows=of, resume=True, refuse=refuse) as journal:
            return journal.note

    run_virtual(scenario(key_of(rows, rollout={"temperature": 1.0}), rows))
    others = [{"raw_prompt": user("!")}]
    changed = scenario(key_of(others, rollout={"temperature": 0.5}), others)
    if refuse:
        with pytest.raises(
            JournalError, match=r"belongs to another rollout: rollout\.temperature, rows changed"
        ):
            run_virtual(changed)
    else:
        assert "rollout.temperature, rows changed; the journal is not used" in run_virtual(changed)
        assert not run_virtual(scenario(key_of(others, rollout={"temperature": 0.5}), others))


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


def test_flushed_records_are_in_the_file_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "j"

    async def scenario() -> None:
        async with JournalWriter(path) as writer:
            for number in range(200):
                writer.append(pack(number))
                if number % 7 == 0:
                    await asyncio.sleep(0)
            await writer.flushed()
            assert [unpack(payload) for payload in read_records(path.read_bytes())[0]] == list(range(200))

    asyncio.run(scenario())


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
