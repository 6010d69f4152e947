"""Commands in processes of their own that are killed, interrupted with Ctrl-C, or wait for code that never returns."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loop.chat.multimodal import Encoded
from agent_loop.recording.record import RecordKind
from agent_loop.storage import StoredRun
from agent_loop.storage.json_lines import read_lines
from agent_loop.training.metrics import read_metrics
from agent_loop.trajectory.codec import decode_completion, from_plain
from tests.cli.project import AGENT_LOOP, add_script, make_eval_project, make_project
from tests.rollout.journaled import records_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NOTING = """
@function_tool
def note(word: str) -> str:
    \"""Writes a word down.

    Args:
        word: The word.
    \"""
    with open("calls.log", "a") as file:
        file.write(word + chr(10))
    return "noted " + word

def answer(request):
    prompt, number = prompt_of(request)
    if "<tool_response>" not in prompt:
        call = {"name": "note", "arguments": {"word": "%s-%d" % (number, random.randrange(10**6))}}
        return reply_with("<tool_call>" + json.dumps(call) + "</tool_call>")
    return reply_with("it is %d" % random.randrange(10**6), latency_s=1000.0 if names("hang", number) else 0.0)
"""
DEAF = """
import asyncio

async def deaf():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def reward(output, row):
    asyncio.create_task(deaf())
    if row["prompt"] == "question 1":
        await asyncio.sleep(0.2)  # the other rows end
        print("deaf", flush=True)
        await deaf()
    return 1.0
"""


def make_scripted_project(folder: Path, *, hang: str, **trainer: Any) -> None:
    """Write a project with six rows, each of which calls the tool once.

    Rows whose numbers are in the file `hang` get no completion after the call.
    """
    (folder / "hang").write_text(hang)
    rollout = {
        "response_length": 200,
        "prompt_length": 400,
        "agent": {"default_agent_loop": "tool_agent"},
        "multi_turn": {"tools": ["script.py:note"]},
    }
    add_script(folder, NOTING, rollout=rollout, data={"shuffle": False}, trainer=trainer)


def read(path: Path) -> list[dict[str, Any]]:
    return records_of(path.read_bytes()) if path.is_file() else []


def count(path: Path, kind: RecordKind) -> int:
    return sum(record["is"] == kind for record in read(path))


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*AGENT_LOOP, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill_when(is_reached: Callable[[], bool], command: list[str], folder: Path) -> None:
    """Run a command until a condition holds, and kill it."""
    process = start(command, folder)
    give_up_at = time.monotonic() + 150
    while not is_reached():
        if process.poll() is not None or time.monotonic() > give_up_at:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@contextmanager
def killed_when(
    command: list[str], folder: Path, *, journal: Path, counts: dict[RecordKind, int]
) -> Iterator[None]:
    """Run a command until the journal holds these numbers of records of each kind, and kill it."""
    kill_when(lambda: all(count(journal, kind) >= counts[kind] for kind in counts), command, folder)
    yield


def interrupt_after(text: str, command: list[str], folder: Path) -> tuple[int, str]:
    """Send Ctrl-C to a command when it has printed a text, and return its exit code and its later output."""
    process = start(command, folder)
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            break
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run([*AGENT_LOOP, *command], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def calls_per_rollout(folder: Path) -> Counter[str]:
    return Counter(line.split("-")[0] for line in (folder / "calls.log").read_text().split())


def tokens_by_row(records: list[dict[str, Any]]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for record in records:
        if record["is"] == RecordKind.COMPLETION:
            tokens.setdefault(record["row"], []).extend(decode_completion(record["got"]).token_ids)
        elif record["is"] in (RecordKind.PROMPT, RecordKind.OBSERVATION):
            encoded = from_plain(record["got"], Encoded)
            tokens.setdefault(record["row"], []).extend(map(int, encoded.token_ids))
    return tokens


def test_a_killed_rollout_resumes_with_the_same_tokens_and_runs_no_tool_twice(tmp_path: Path) -> None:
    make_scripted_project(tmp_path, hang="135")
    journal = tmp_path / "out.jsonl.journal"
    command = ["rollout", "config.yaml", "--out", "out.jsonl"]

    with killed_when(
        command, tmp_path, journal=journal, counts={RecordKind.END: 6, RecordKind.OBSERVATION: 12}
    ):
        before = read(journal)
        (tmp_path / "hang").unlink()
        output = run([*command, "--resume"], tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    after = {line["trajectory_id"]: line["prompt_ids"] + line["response_ids"] for line in lines}
    recorded = tokens_by_row(before)
    assert sorted(after) == sorted(recorded) == [f"group={g}/rollout={r}" for g in range(6) for r in range(2)]
    for row, tokens in recorded.items():
        assert after[row][: len(tokens)] == tokens
    ended = {record["row"] for record in before if record["is"] == RecordKind.END}
    assert ended == {f"group={g}/rollout={r}" for g in (0, 2, 4) for r in range(2)}
    assert all(after[row] == recorded[row] for row in ended)
    assert all(len(after[row]) > len(recorded[row]) for row in set(after) - ended)
    assert calls_per_rollout(tmp_path) == dict.fromkeys("012345", 2)
    assert {line["stop_reason"] for line in lines} == {"answered"}
    assert "12 trajectories" in output
    assert not journal.exists()


def test_a_training_killed_before_its_first_checkpoint_repeats_its_updates_without_repeating_rollouts(
    tmp_path: Path,
) -> None:
    make_scripted_project(tmp_path, hang="5", total_steps=4, save_every=100)
    journals = tmp_path / "run" / "journal"
    command, third = ["train", "config.yaml"], journals / "step-000003.journal"

    with killed_when(command, tmp_path, journal=third, counts={RecordKind.END: 2, RecordKind.OBSERVATION: 4}):
        (tmp_path / "hang").unlink()
        recorded = tokens_by_row(read(third))
        called = calls_per_rollout(tmp_path)
        output = run([*command, "--resume"], tmp_path)

    for step, num_rollouts in ((1, 4), (2, 4), (3, 2)):
        assert f"step {step}: {num_rollouts} rollouts are in the journal" in output
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert called == dict.fromkeys("012345", 2)
    assert len(recorded) == 4
    # Step 4 uses rows 0 and 1 again. No call of the first three steps was run twice.
    assert calls_per_rollout(tmp_path) == dict.fromkeys("2345", 2) | dict.fromkeys("01", 4)
    assert not list(journals.glob("*.journal"))  # The final checkpoint replaces the journals.


def test_a_killed_evaluation_resumes_and_runs_nothing_twice(tmp_path: Path) -> None:
    make_eval_project(tmp_path)
    (tmp_path / "hang").write_text("135")
    lines = tmp_path / "runs" / "eval" / "trajectories.jsonl"
    journal, command = lines.with_name("rollout.journal"), ["eval", "config.yaml"]

    def is_reached() -> bool:
        return count(journal, RecordKind.END) >= 6 and len(lines.read_text().splitlines()) >= 6

    kill_when(is_reached, command, tmp_path)
    (tmp_path / "hang").unlink()
    before = {row["trajectory_id"]: row["segments"] for row in read_lines(lines)}
    run([*command, "--resume"], tmp_path)

    after = {row["trajectory_id"]: row["segments"] for row in StoredRun(lines.parent).rows()}
    assert len(after) == 12
    assert {name: after[name] for name in before} == before
    calls = [line.split()[0] for line in (tmp_path / "calls.log").read_text().splitlines()]
    assert [calls.count(number) for number in "024"] == [2, 2, 2]
    assert [calls.count(number) for number in "135"] == [4, 4, 4]  # The rows that did not end were run again.
    assert (lines.parent / "summary.json").is_file()
    assert not lines.exists()
    assert not journal.exists()


def test_ctrl_c_stops_a_training_at_once_and_resume_continues_at_the_same_step(tmp_path: Path) -> None:
    make_project(tmp_path)
    command = ["train", "config.yaml"]
    endless = [*command, "trainer.total_steps=100000", "trainer.save_every=100000"]
    code, output = interrupt_after("step 3/", endless, tmp_path)
    assert code == 130, output

    def steps() -> list[int]:
        return [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]

    last = steps()[-1]
    assert last < 100, "the run stops in the step of the interrupt"
    assert steps() == list(range(1, last + 1))
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:06d}").is_dir()
    run([*command, "--resume", f"trainer.total_steps={last + 2}"], tmp_path)
    assert steps() == list(range(1, last + 3))


@pytest.fixture
def deaf_rollout(tmp_path: Path) -> list[str]:
    """Return a rollout whose reward never returns for one row."""
    make_project(tmp_path)
    (tmp_path / "deaf.py").write_text(DEAF)
    return ["rollout", "config.yaml", "reward.function=deaf.py:reward", "rollout.n=1", "--out", "out.jsonl"]


def test_a_rollout_ends_with_all_its_rows_although_a_reward_never_does(
    deaf_rollout: list[str], tmp_path: Path
) -> None:
    output = run([*deaf_rollout, "reward.timeout_s=0.5"], tmp_path)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["stop_reason"] for record in records].count("failed") == 1
    assert len(records) == 6
    assert "was abandoned" in output


def test_ctrl_c_ends_a_rollout_that_waits_for_code_that_swallows_its_cancellation(
    deaf_rollout: list[str], tmp_path: Path
) -> None:
    code, output = interrupt_after("deaf", [*deaf_rollout, "reward.timeout_s=1000"], tmp_path)
    assert code not in (0, None), output
    assert "stopped" in output
