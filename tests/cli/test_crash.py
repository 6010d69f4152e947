"""A run that was killed with `kill -9` in the middle of a step is resumed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.chat.multimodal import Encoded
from agent_loop.recording.record import RecordKind
from agent_loop.training.metrics import read_metrics
from agent_loop.trajectory.codec import decode_completion, from_plain
from tests.cli.project import make_project
from tests.rollout.journaled import records_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

AGENT_LOOP = [sys.executable, "-c", "from agent_loop.cli import main; main()"]

SCRIPT = """
import os
import random

from agent_loop import function_tool
from agent_loop.servers.scripted import ScriptedReply
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")

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
    prompt = tokenizer.decode(request.prompt_ids.tolist())
    number = int(prompt.split("question ")[1][0])
    if "<tool_response>" not in prompt:
        call = '{"name": "note", "arguments": {"word": "%d-%d"}}' % (number, random.randrange(10**6))
        text, latency_s = "<tool_call>" + call + "</tool_call>", 0.0
    else:
        hangs = os.path.exists("hang") and str(number) in open("hang").read()
        text, latency_s = "it is %d" % random.randrange(10**6), 1000.0 if hangs else 0.0
    ids = tokenizer.backend_tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids
    return ScriptedReply(ids, logprobs=[-random.random() for _ in ids], latency_s=latency_s)
"""


def make_scripted_project(folder: Path, *, hang: str, **trainer: Any) -> None:
    """Write a project with six rows, each of which calls the tool once.

    Rows whose numbers are in the file `hang` get no completion after the call.
    """
    (folder / "hang").write_text(hang)
    path = make_project(folder)
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    settings = yaml.safe_load(path.read_text())
    settings["rollout"] |= {
        "engine": "scripted",
        "engine_kwargs": {"script": "script.py:answer"},
        "response_length": 200,
        "prompt_length": 400,
        "agent": {"default_agent_loop": "tool_agent"},
        "multi_turn": {"tools": ["script.py:note"]},
    }
    settings["data"] |= {"shuffle": False}
    settings["trainer"] |= trainer
    path.write_text(yaml.safe_dump(settings))


def read(path: Path) -> list[dict[str, Any]]:
    return records_of(path.read_bytes()) if path.is_file() else []


@contextmanager
def killed_when(
    command: list[str], folder: Path, *, journal: Path, counts: dict[RecordKind, int]
) -> Iterator[None]:
    """Run a command until the journal holds these numbers of records of each kind, and kill it."""
    process = subprocess.Popen(
        [*AGENT_LOOP, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    give_up_at = time.monotonic() + 150
    while any(sum(r["is"] == kind for r in read(journal)) < count for kind, count in counts.items()):
        if process.poll() is not None or time.monotonic() > give_up_at:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    yield


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run([*AGENT_LOOP, *command], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def test_a_killed_rollout_resumes_with_the_same_tokens_and_runs_no_tool_twice(
    tmp_path: Path,
) -> None:
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

    assert "step 1: 4 rollouts are in the journal" in output
    assert "step 2: 4 rollouts are in the journal" in output
    assert "step 3: 2 rollouts are in the journal" in output
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert called == dict.fromkeys("012345", 2)
    assert len(recorded) == 4
    # Step 4 uses rows 0 and 1 again. No call of the first three steps was run twice.
    assert calls_per_rollout(tmp_path) == dict.fromkeys("2345", 2) | dict.fromkeys("01", 4)
    assert not list(journals.glob("*.journal"))  # The final checkpoint replaces the journals.
