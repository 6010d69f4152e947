"""Events in files of the `file` backend, whose size is linear in the tokens, and the writer in the background."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

from agent_loop.chat.template import ChatTemplate
from agent_loop.cli import app
from agent_loop.config import TraceConfig
from agent_loop.errors import DataError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.runtime import background_writer as writer_module
from agent_loop.runtime.background_writer import BackgroundWriter
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.tracing.documents import trace_document
from agent_loop.tracing.trace_files import event_lines, line_of, read_traces
from agent_loop.tracing.tracer import make_token_decoder
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from tests.helpers import encoded, hermes_template, small_tokenizer, text_reply, tool_call_reply, user
from tests.tracing.harness import events_in, manager_of, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "traces.jsonl"


def run_to(path: Path, **options: Any) -> list[Trajectory]:
    trace = {name: options.pop(name) for name in list(options) if name in TraceConfig.model_fields}
    return run(TraceConfig(backend="file", path=str(path), **trace), **options)


def of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events_in(path) if event["event"] == kind]


def kinds(events: list[dict[str, Any]]) -> str:
    return " ".join(event["event"] for event in events if event["event"] != "span")


def test_every_turn_has_one_event_with_its_new_tokens_and_times(path: Path) -> None:
    [trajectory] = run_to(path, experiment_name="tries")
    events = events_in(path)
    assert kinds(events) == "began prompt generate tool observation generate reward end"
    assert {event["trajectory_id"] for event in events} == {"step=3/group=0/rollout=0"}
    ids = [id_ for event in events if "tokens" in event for id_ in event["tokens"]["ids"]]
    output = trajectory.output
    assert ids == [*output.prompt_ids.tolist(), *output.response_ids.tolist()]
    assert events[0]["attributes"] == {
        "trajectory_id": "step=3/group=0/rollout=0",
        "step": 3,
        "sample_index": 0,
        "rollout_n": 0,
        "validate": False,
        "agent_name": "tool_agent",
        "experiment_name": "tries",
        "name": "agent_loop",
    }
    [tool], (first, last) = of_kind(path, "tool"), of_kind(path, "generate")
    assert tool["time"]["end"] - tool["time"]["start"] >= 0.002
    assert first["time"]["end"] <= tool["time"]["start"] <= tool["time"]["end"] <= last["time"]["start"]
    assert trajectory.trace is not None
    assert last["time"]["end"] <= trajectory.trace.seconds
    assert {first["server"], last["server"]} == {"scripted-0"}


def test_token2text_replaces_ids_by_texts(path: Path) -> None:
    run_to(path, token2text=True)
    assert all(event["tokens"]["ids"] is None for event in events_in(path) if "tokens" in event)
    [prompt], (first, last) = of_kind(path, "prompt"), of_kind(path, "generate")
    assert "What is 1 + 2?" in prompt["tokens"]["text"]
    assert '"arguments": {"a": 1, "b": 2}' in first["tokens"]["text"]
    assert last["tokens"]["text"] == "three<|im_end|>"
    [tool] = of_kind(path, "tool")
    assert (tool["arguments"], tool["reply"]) == ({"a": 1, "b": 2}, "3")


def test_without_token2text_events_have_no_text_of_the_conversation(path: Path) -> None:
    run_to(path, rows=[{"raw_prompt": user("the secret word is fox")}])
    assert "secret" not in path.read_text()
    [tool] = of_kind(path, "tool")
    assert (tool["arguments"], tool["reply"]) == (None, None)


def test_validation_refills_and_the_step_come_from_the_run(path: Path) -> None:
    run_to(path, runs=[{"label": "step=7/refill=2"}, {"label": "val/step=7", "validate": True}, {}])
    began = [event["attributes"] for event in of_kind(path, "began")]
    assert [(each["step"], each["validate"]) for each in began] == [(7, False), (7, True), (None, False)]


def test_the_traced_rows_of_a_step_are_reproducible_and_keep_whole_groups(tmp_path: Path) -> None:
    def chosen(name: str, step: int) -> Counter[int]:
        rows = [{"raw_prompt": user("hello"), "index": 100 + number} for number in range(10)]
        runs = [{"label": f"step={step}", "n": 3}]
        options = {"script": [text_reply("hi")], "rows": rows, "runs": runs}
        run_to(tmp_path / name, max_samples_per_step_per_worker=2, **options)
        return Counter(event["attributes"]["sample_index"] for event in of_kind(tmp_path / name, "began"))

    once = chosen("a", 1)
    assert len(once) == 2
    assert set(once.values()) == {3}
    assert all(index >= 100 for index in once)
    assert chosen("b", 1) == once
    assert any(chosen(f"c{step}", step) != once for step in range(2, 5))


@register("many_branches")
class ManyBranches(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"]) as episode:
            outputs: list[AgentLoopOutput] = []
            for _ in range(row["num_branches"]):
                async with episode.branch() as branch:
                    await branch.generate(sampling_params)
                    outputs.append(branch.output())
            return outputs


def run_branches(path: Path, num_branches: int) -> None:
    """Trace a row with branches of different texts of different lengths."""
    numbers = itertools.count()
    row = {"raw_prompt": user("go"), "agent_name": "many_branches", "num_branches": num_branches}
    run_to(path, script=lambda request: text_reply("the" * (1 + next(numbers) % 40)), rows=[row])


def test_each_branch_has_events_of_its_own_turns(path: Path) -> None:
    run_branches(path, 2)
    events = events_in(path)
    ids = sorted({event["trajectory_id"] for event in events})
    assert [id_[-8:] for id_ in ids] == ["branch=0", "branch=1"]
    for id_ in ids:
        own = [event for event in events if event["trajectory_id"] == id_]
        assert kinds(own) == "began prompt generate reward end"


def test_a_failed_trajectory_has_the_reason(path: Path) -> None:
    run_to(path, script=[ScriptedReply(encoded("no"), error="the engine is on fire")], max_failed_share=1.0)
    end = events_in(path)[-1]
    assert end["stop_reason"] == "failed"
    assert "on fire" in end["failure"]


@pytest.mark.parametrize("token2text", [False, True])
def test_events_grow_linearly_with_the_tokens(tmp_path: Path, token2text: bool) -> None:
    def bytes_per_token(num_turns: int) -> tuple[float, float]:
        path = tmp_path / f"{num_turns}.jsonl"

        def script(request: ScriptedRequest) -> ScriptedReply:
            is_last = request.turn == num_turns - 1
            return text_reply("done") if is_last else tool_call_reply("add", a=request.turn, b=2)

        [trajectory] = run_to(path, script=script, token2text=token2text)
        assert trajectory.output.num_assistant_turns == num_turns
        num_tokens = len(trajectory.output.prompt_ids) + len(trajectory.output.response_ids)
        [document] = read_traces(path)
        return path.stat().st_size / num_tokens, sum(map(len, event_lines(document))) / num_tokens

    stored, rendered = zip(bytes_per_token(10), bytes_per_token(200), strict=True)
    assert stored[1] < 2 * stored[0]
    assert rendered[1] < 2 * rendered[0]


def test_a_branch_does_not_store_the_spans_of_all_branches(tmp_path: Path) -> None:
    def bytes_per_branch(num_branches: int) -> float:
        path = tmp_path / f"{num_branches}.jsonl"
        run_branches(path, num_branches)
        assert len(list(read_traces(path))) == num_branches
        return path.stat().st_size / num_branches

    assert bytes_per_branch(40) < 1.3 * bytes_per_branch(4)


def test_texts_are_those_of_the_tokenizer() -> None:
    template = hermes_template()
    backend = template.tokenizer.backend_tokenizer
    random = np.random.default_rng(0)
    others = ChatTemplate(small_tokenizer(), tool_parser="hermes", encoder="tokenizers")
    for length in (1, 0, 3, 500):
        ids = random.integers(0, backend.get_vocab_size() + 50, length).astype(np.int32)
        expected = backend.decode(ids.tolist(), skip_special_tokens=False)
        assert make_token_decoder(template)(ids) == make_token_decoder(others)(ids) == expected


def test_an_incomplete_line_is_skipped_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_to(path, runs=[{"n": 3}])
    path.write_bytes(path.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING):
        assert len(list(read_traces(path))) == 2
    assert "line 3 is incomplete" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"event": "began"}', "line 1 is not a trajectory that rollout.trace.backend=file wrote"),
        ("what?", "line 1 is not a trajectory"),
        ('{"version": 99}', "line 1 has version 99, but this agent-loop reads 2; read it with the version"),
    ],
)
def test_an_invalid_line_is_rejected_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "traces.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        list(read_traces(tmp_path / "traces.jsonl"))


def test_values_that_json_cannot_represent_are_described(tmp_path: Path) -> None:
    [trajectory] = run(TraceConfig())
    strange = {"half": "a \ud83d b", "large": 2**70, "infinite": float("inf"), "object": object(), 3: (1, 2)}
    scored = structs.replace(trajectory, reward=1.0, reward_extra=strange)
    path = tmp_path / "traces.jsonl"
    path.write_bytes(line_of(trace_document(scored, {"trajectory_id": "group=0"}, decode=None)))
    [stored] = read_traces(path)
    assert stored["reward_extra"].pop("object").startswith("<object object at")
    assert stored["reward_extra"] == {"half": "a ? b", "large": 2.0**70, "infinite": None, "3": [1, 2]}


def test_the_command_prints_events_of_the_requested_trajectories(path: Path) -> None:
    run_to(path, runs=[{"label": "step=1"}, {"label": "step=2", "n": 2}])
    result = CliRunner().invoke(app, ["traces", str(path), "--trajectory", "step=2/"], catch_exceptions=False)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    ids = {event["trajectory_id"] for event in events}
    assert ids == {f"step=2/group=0/rollout={n}" for n in range(2)}
    assert events == [event for event in events_in(path) if "step=2" in event["trajectory_id"]]


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
