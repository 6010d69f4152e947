"""Replays of finished trajectories with recorded responses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from agent_loop.config import Config, load_config
from agent_loop.errors import DataError
from agent_loop.recording.recorded_responses import extract_responses, first_difference
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.replay import replay_trajectory
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.trajectory import Incident, IncidentKind, Trajectory
from agent_loop.types import StopReason
from tests.helpers import (
    call_text,
    encoded,
    hermes_template,
    small_tokenizer,
    text_reply,
    tool_call_reply,
    user,
)

TASK = '''
from pathlib import Path

from agent_loop import BaseInteraction, BaseTool, ToolResponse, function_tool
from tests.helpers import text_reply, tool_call_reply

@function_tool
def shout(word: str) -> str:
    """Shout.

    Args:
        word: What.
    """
    Path("shouted.log").write_text(word)
    return word.upper() * 40


def farewell(request):
    return text_reply("farewell")

def count_again(request):
    return tool_call_reply("count")

class Counter(BaseTool):
    """Tool that counts its calls and does not set `on_replay`."""

    tool_schema = {
        "type": "function",
        "function": {
            "name": "count", "description": "Count.", "parameters": {"type": "object", "properties": {}}
        },
    }

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="one more"), 0.5, {"counted": 1}

class Guide(BaseInteraction):
    opens_conversation = True
    on_replay = "recorded"

    async def start_interaction(self, instance_id=None, **kwargs):
        self.asked = 0
        return "Welcome."

    async def generate_response(self, instance_id, messages, **kwargs):
        Path("guided.log").write_text("x")
        is_over = messages[-1]["content"].endswith("bye")
        return is_over, "Well done." if is_over else "Go on.", 1.0 if is_over else 0.25, {"seen": len(messages)}
'''


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    small_tokenizer().save_pretrained("model")
    Path("task.py").write_text(TASK, encoding="utf-8")
    interactions = {"interaction": [{"name": "guide", "class_name": "task.py:Guide", "config": {}}]}
    multi_turn = {
        "tools": ["task.py:shout", "task.py:Counter"],
        "interaction_config_path": "interactions.yaml",
        "format": "hermes",
        "max_tool_response_length": 40,
    }
    rollout = {
        "engine": "scripted",
        "prompt_length": 800,
        "response_length": 800,
        "agent": {"default_agent_loop": "tool_agent"},
        "multi_turn": multi_turn,
    }
    Path("interactions.yaml").write_text(yaml.safe_dump(interactions), encoding="utf-8")
    Path("config.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}, "rollout": rollout}))
    return load_config("config.yaml")


def run(config: Config, replies: list[ScriptedReply], **row: object) -> Trajectory:
    async def run_once() -> Trajectory:
        servers = [ScriptedServer(replies)]
        async with AgentLoopManager(config.rollout, servers=servers, template=hermes_template()) as manager:
            return (await manager.run([{"raw_prompt": user("hello"), **row}], n=1))[0]

    return asyncio.run(run_once())


def again(config: Config, trajectory: Trajectory, *, recorded: Any = None, **options: Any) -> Trajectory:
    recorded = recorded or extract_responses(trajectory)
    options = {"continue_live": False, **options}
    return asyncio.run(replay_trajectory(config, trajectory, recorded=recorded, **options))[0]


def assert_identical(old: Trajectory, new: Trajectory) -> None:
    assert new.output.failure is None
    assert first_difference(old.output, new.output) is None
    assert new.output.stop_reason is old.output.stop_reason
    assert new.output.messages == old.output.messages
    kinds, feedback = (
        [[i.kind for i in each.output.incidents] for each in (old, new)],
        [[(f.name, f.place, f.reward) for f in each.output.feedback] for each in (old, new)],
    )
    assert kinds[0] == kinds[1]
    assert feedback[0] == feedback[1]


def test_a_turn_with_calls_of_several_kinds_is_replayed(config: Config) -> None:
    calls = call_text("shout", word="a") + call_text("count") + call_text("unknown")
    turns = [f"{calls}<tool_call>\n{{broken\n</tool_call>", call_text("shout", word="b"), "done"]
    old = run(config, list(map(text_reply, turns)))
    assert old.output.stop_reason is StopReason.ANSWERED
    kinds = {incident.kind for incident in old.output.incidents}
    assert {IncidentKind.UNKNOWN_TOOL, IncidentKind.MALFORMED_CALL, IncidentKind.TRUNCATED_REPLY} <= kinds
    Path("shouted.log").unlink()
    assert_identical(old, again(config, old))
    assert not Path("shouted.log").exists()


def test_an_interaction_that_opens_the_conversation_is_replayed(config: Config) -> None:
    old = run(config, [text_reply("first"), text_reply("bye")], interaction_kwargs={"name": "guide"})
    assert old.output.stop_reason is StopReason.INTERACTION_FINISHED
    assert old.output.messages[0]["content"] == "hello\n\nWelcome."
    Path("guided.log").unlink()
    assert_identical(old, again(config, old))
    assert not Path("guided.log").exists()


@pytest.mark.parametrize("text", ["a" * 30, "cut"])
def test_a_turn_that_was_cut_is_replayed(config: Config, text: str) -> None:
    old = run(config, [text_reply(text, ends=False)])
    assert_identical(old, again(config, old))


def test_a_turn_sampled_by_two_weight_versions_is_replayed(config: Config) -> None:
    old = run(config, [text_reply("answer in two parts")])
    prompt, said = old.output.segments
    half = len(said) // 2
    parts = [said.part(0, half), structs.replace(said.part(half, len(said)), weight_version=1)]
    old = structs.replace(old, output=replace(old.output, segments=[prompt, *parts]))
    new = again(config, old)
    assert_identical(old, new)
    assert [segment.weight_version for segment in new.output.segments] == [None, 0, 1]


def test_a_replay_under_another_limit_differs_where_the_limit_applies(config: Config) -> None:
    old = run(config, [tool_call_reply("shout", word="a"), text_reply("done")])
    config = load_config("config.yaml", overrides=["rollout.multi_turn.max_tool_response_length=20"])
    difference = first_difference(old.output, again(config, old).output)
    assert difference is not None
    assert difference.where == "tool tokens, assistant turn 1"
    assert difference.old != difference.new


@pytest.mark.parametrize("script", ["farewell", "count_again"])
def test_a_live_continuation_fails_at_the_next_call_of_a_tool_that_cannot_be_replayed(
    config: Config, script: str
) -> None:
    old = run(config, [tool_call_reply("count"), text_reply("done")])
    recorded = extract_responses(old).before(2)
    config = load_config("config.yaml", overrides=[f"rollout.engine_kwargs.script=task.py:{script}"])
    output = again(config, old, recorded=recorded, continue_live=True).output
    if script == "farewell":
        assert output.failure is None
        assert output.messages[-1]["content"] == "farewell"
    else:
        assert output.failure is not None
        assert "tool 'count' is called after tool 'count', whose state" in output.failure.error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"branch": 1, "messages": [{"role": "assistant", "content": "done"}]}, "one of several branches"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has images"),
        ({"messages": []}, "1 completions but 0 assistant messages"),
    ],
)
def test_a_trajectory_with_incomplete_records_is_refused(
    config: Config, changes: dict[str, object], message: str
) -> None:
    old = run(config, [text_reply("done")])
    old = structs.replace(
        old, branch=changes.get("branch"), output=replace(old.output, messages=changes["messages"])
    )
    with pytest.raises(DataError, match=message):
        extract_responses(old)


def test_identical_trajectories_have_no_difference(config: Config) -> None:
    old = run(config, [text_reply("done")])
    noted = old.output.noted(Incident(IncidentKind.RESTARTED, "once"))
    assert first_difference(old.output, noted) is None
    longer = run(config, [text_reply("done and more")])
    difference = first_difference(old.output, longer.output)
    assert difference is not None
    assert difference.index == len(old.output.prompt_ids) + len(encoded("done"))
