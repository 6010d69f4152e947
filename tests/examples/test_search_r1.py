"""Tests of the Search-R1 example with a scripted model that searches step by step, over the real index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.types import StopReason
from tests.examples.scripted import context_of, run_scripted
from tests.helpers import text_reply, tool_call_reply

FOLDER = Path("examples/search_r1")
ROOMY = [
    "rollout.prompt_length=4000",
    "rollout.response_length=8000",
    "rollout.multi_turn.max_tool_response_length=2000",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def rows() -> list[dict[str, Any]]:
    return load_rows(["examples/search_r1/task.py:rows"], prompt_key="prompt")


def hopper(request: ScriptedRequest) -> ScriptedReply:
    """Search for the novel, then for its author, then for the town, each as named in the previous result."""
    context = context_of(request)
    asked = re.findall(r"the author of (.+?)(?: born| was born)\?", context)[-1]
    author = re.search(rf"{re.escape(asked)} is a novel by ([\w ]+)\.", context)
    if author is None:
        return tool_call_reply("search", query_list=[f"novel {asked}"])
    town = re.search(rf"{author[1]} is a novelist, born in ([\w ]+?) as", context)
    if town is None:
        return tool_call_reply("search", query_list=[f"{author[1]} novelist born"])
    if "On which river" not in context:
        return text_reply(f"<answer>{town[1]}</answer>")
    river = re.search(rf"{town[1]} is a market town on the river (\w+)", context)
    if river is None:
        return tool_call_reply("search", query_list=[f"{town[1]} market town river"])
    return text_reply(f"<answer>The {river[1]}.</answer>")


def test_the_corpus_answers_every_question_step_by_step() -> None:
    trajectories = run_scripted(FOLDER, rows(), hopper, overrides=ROOMY)
    assert [t.output.failure for t in trajectories] == [None] * 12
    assert [t.output.stop_reason for t in trajectories] == [StopReason.ANSWERED] * 12
    assert [t.reward for t in trajectories] == [1.0] * 12
    assert [t.output.metrics.num_tool_calls for t in trajectories] == [2, 3] * 6


@pytest.mark.parametrize(("answer", "reward"), [("<answer> merrowby! </answer>", 1.0), ("Merrowby", 0.0)])
def test_answers_are_normalised_as_in_search_r1(answer: str, reward: float) -> None:
    [trajectory] = run_scripted(FOLDER, rows()[:1], lambda _: text_reply(answer), overrides=ROOMY)
    assert trajectory.reward == reward
