"""Tests that a writer which fails, hangs or is slow does not affect the rollout."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from agent_loop.config import TraceConfig
from agent_loop.runtime import background_writer as writer_module
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.tracing.trace_files import read_traces
from tests.helpers import text_reply, user
from tests.tracing.harness import manager_of, run


class Notebook:
    """Writer that stores its batches, and calls a function before each."""

    def __init__(self, at_write: Callable[[int], None] = lambda number: None, *, max_batch: int = 1) -> None:
        self.batches: list[list[object]] = []
        self.max_batch = max_batch
        self.is_closed = False
        self.num_opened = self._num_writes = 0
        self._at_write = at_write

    @property
    def items(self) -> list[object]:
        return [item for batch in self.batches for item in batch]

    def open(self) -> None:
        self.num_opened += 1

    def write(self, items: Iterable[object], /) -> None:
        self._num_writes += 1
        self._at_write(self._num_writes)
        self.batches.append(list(items))

    def close(self) -> None:
        self.is_closed = True


def write(notebook: Notebook, *, count: int, max_queued: int = 100) -> BackgroundWriter[int]:
    """Return a writer with `count` items in its queue."""
    writer = BackgroundWriter[int](notebook, name="notes", max_queued=max_queued)
    for number in range(count):
        writer.put(number)
    return writer


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "agent_loop.runtime.background_writer"]


def test_all_items_are_written_in_order_and_the_writer_is_closed() -> None:
    notebook = Notebook()
    background_writer = write(notebook, count=50)
    background_writer.close(timeout_s=10)
    assert notebook.items == list(range(50))
    assert (notebook.num_opened, notebook.is_closed, background_writer.num_dropped) == (1, True, 0)


def test_items_that_fail_are_dropped_and_logged_once_per_error_type(caplog: pytest.LogCaptureFixture) -> None:
    def fails(number: int) -> None:
        if number % 2:
            raise OSError(28, "No space left on device") if number < 7 else ValueError("what?")

    notebook = Notebook(fails)
    background_writer = write(notebook, count=10)
    background_writer.close(timeout_s=10)
    assert notebook.items == [1, 3, 5, 7, 9]
    assert background_writer.num_dropped == 5
    assert warnings(caplog) == [
        "notes cannot be written: OSError: [Errno 28] No space left on device; the run continues, and reports it once",
        "notes cannot be written: ValueError: what?; the run continues, and reports it once",
        "notes: 5 in total were not written",
    ]


def test_opening_a_writer_is_retried_with_the_next_item() -> None:
    class Late(Notebook):
        def open(self) -> None:
            super().open()
            if self.num_opened < 3:
                raise ConnectionError("not yet")

    late = Late()
    background_writer = write(late, count=5)
    background_writer.close(timeout_s=10)
    assert late.items == [2, 3, 4]
    assert background_writer.num_dropped == 2


def test_a_hung_writer_drops_items_and_delays_the_end_briefly(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    started = time.monotonic()
    background_writer = write(Notebook(lambda _: assert_waits(release)), count=10, max_queued=3)
    background_writer.close(timeout_s=0.2)
    assert time.monotonic() - started < 5
    assert background_writer.num_dropped == 10
    assert warnings(caplog)[-1] == "notes: 10 in total were not written"
    release.set()


def assert_waits(event: threading.Event) -> None:
    assert event.wait(timeout=60)


def test_a_full_disk_is_logged_once_and_loses_only_traces(caplog: pytest.LogCaptureFixture) -> None:
    trajectories = run(TraceConfig(backend="file", path="/dev/full"), runs=[{"n": 3}])
    assert len(trajectories) == 3
    first, last = warnings(caplog)
    assert "No space left on device" in first
    assert last == "traces to file: 3 in total were not written"


def test_queued_traces_are_written_after_the_rollout_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"

    async def main() -> None:
        trace = TraceConfig(backend="file", path=str(path))
        async with manager_of(ScriptedServer([text_reply("hi")]), trace=trace) as manager:
            await manager.run([{"raw_prompt": user("hello")}], n=5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert len(list(read_traces(path))) == 5


def test_items_that_arrive_while_a_writer_is_busy_are_written_in_bounded_batches() -> None:
    release = threading.Event()
    notebook = Notebook(lambda _: assert_waits(release), max_batch=4)
    background_writer = write(notebook, count=10)
    release.set()
    background_writer.close(timeout_s=10)
    assert notebook.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_short_queue_is_written_as_soon_as_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BATCH_WINDOW_S", 600.0)
    written = threading.Event()
    background_writer = write(Notebook(lambda _: written.set(), max_batch=4), count=2, max_queued=2)
    assert written.wait(timeout=60)
    background_writer.close(timeout_s=10)
    assert background_writer.num_dropped == 0
