"""A rollout of coding agents that was killed with `kill -9` is resumed with the same tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.chat.multimodal import Encoded
from agent_loop.recording.record import RecordKind
from agent_loop.trajectory.codec import decode_completion, from_plain
from tests.agents.programs import AGENTS, TASK
from tests.agents.test_programs import CHECK, processes_with
from tests.cli.project import make_project
from tests.cli.test_crash import killed_when, read, run

pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("on_path", "workspaces_root"),
]

SCRIPT = """
import os
import random
from dataclasses import replace

from tests.agents.programs import AGENTS, policy
from tests.helpers import small_tokenizer

AGENT = AGENTS[{name!r}]
RESULT = small_tokenizer().convert_tokens_to_ids("<tool_response>")

def answer(request):
    number = random.randrange(10**6)
    commands = [f"echo {{number}}", f"echo {{number}} > other.txt; echo hello > greeting.txt"]
    reply = policy(AGENT, *commands)(request)
    hangs = os.path.exists("hang") and request.prompt_ids.tolist().count(RESULT) == 1
    return replace(reply, latency_s=1000.0 if hangs else 0.0)
"""
NUM_ROLLOUTS = 2


def make_agent_project(folder: Path, *, agent: str) -> None:
    """Write a project with two rollouts of a task. Their agents wait for the second completion after a tool call."""
    path = make_project(folder)
    (folder / "hang").touch()
    (folder / "script.py").write_text(SCRIPT.format(name=agent), encoding="utf-8")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": TASK, "workspace": {"check": CHECK}}))
    settings = yaml.safe_load(path.read_text())
    settings["rollout"] |= {
        "engine": "scripted",
        "engine_kwargs": {"script": "script.py:answer"},
        "n": NUM_ROLLOUTS,
        "prompt_length": 400_000,
        "response_length": 100_000,
        "agent": {"default_agent_loop": agent},
    }
    del settings["reward"]
    path.write_text(yaml.safe_dump(settings))


def recorded_conversations(records: list[dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    """Return the tokens on record by row and conversation."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for record in records:
        if record["is"] == RecordKind.COMPLETION:
            new = decode_completion(record["got"]).token_ids
        elif record["is"] in (RecordKind.PROMPT, RecordKind.OBSERVATION):
            new = from_plain(record["got"], Encoded).token_ids
        else:
            continue
        tokens.setdefault((record["row"], record["at"][0]), []).extend(map(int, new))
    return tokens


@pytest.mark.parametrize("agent", AGENTS)
def test_a_killed_rollout_of_an_agent_resumes_with_the_same_tokens(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    make_agent_project(tmp_path, agent=agent)
    command = ["rollout", "config.yaml", "--out", "out.jsonl"]
    journal = tmp_path / "out.jsonl.journal"
    with killed_when(command, tmp_path, journal=journal, counts={RecordKind.OBSERVATION: NUM_ROLLOUTS}):
        before = recorded_conversations(read(journal))
        (tmp_path / "hang").unlink()
        run([*command, "--resume"], tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["failure"] for line in lines] == [None] * len(lines)
    assert {line["stop_reason"] for line in lines} == {"answered"}
    assert {line["reward"] for line in lines} == {1.0}
    incidents = [incident for line in lines for incident in line["incidents"]]
    assert not [incident for incident in incidents if incident["kind"] == "restarted"]
    after = [(line["trajectory_id"], line["prompt_ids"] + line["response_ids"]) for line in lines]
    assert len(before) >= NUM_ROLLOUTS
    for (row, _), tokens in before.items():
        assert any(name.startswith(row) and whole[: len(tokens)] == tokens for name, whole in after)
    [root] = Path(os.environ["TMPDIR"]).glob("agent-loop-workspaces-*")
    assert list(root.iterdir()) == []
    assert processes_with(lambda variable: variable.startswith(f"HOME={root}".encode())) == []
