"""Events of a trajectory, whose size is linear in its tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import TraceConfig
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.tracing.trace_files import event_lines, read_traces
from agent_loop.trajectory import AgentLoopOutput
from tests.helpers import encoded, text_reply, tool_call_reply, user
from tests.tracing.harness import events_in, run


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events if event["event"] != "span"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "traces.jsonl"


def test_every_turn_has_one_event_with_its_new_tokens(path: Path) -> None:
    [trajectory] = run(TraceConfig(backend="file", path=str(path), experiment_name="tries"))
    events = events_in(path)
    assert kinds(events) == [
        "began",
        "prompt",
        "generate",
        "tool",
        "observation",
        "generate",
        "reward",
        "end",
    ]
    assert {event["trajectory_id"] for event in events} == {"step=3/group=0/rollout=0"}
    with_tokens = [event for event in events if "tokens" in event]
    assert [id_ for event in with_tokens for id_ in event["tokens"]["ids"]] == [
        *trajectory.output.prompt_ids.tolist(),
        *trajectory.output.response_ids.tolist(),
    ]
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


def test_token2text_replaces_ids_by_texts(path: Path) -> None:
    run(TraceConfig(backend="file", path=str(path), token2text=True))
    events = events_in(path)
    assert all(event["tokens"]["ids"] is None for event in events if "tokens" in event)
    prompt, first, last = (
        event["tokens"]["text"] for event in events if event["event"] in ("prompt", "generate")
    )
    assert "What is 1 + 2?" in prompt
    assert '"arguments": {"a": 1, "b": 2}' in first
    assert last == "three<|im_end|>"
    [tool] = [event for event in events if event["event"] == "tool"]
    assert (tool["arguments"], tool["reply"]) == ({"a": 1, "b": 2}, "3")


def test_without_token2text_events_have_no_text_of_the_conversation(path: Path) -> None:
    run(TraceConfig(backend="file", path=str(path)), rows=[{"raw_prompt": user("the secret word is fox")}])
    assert "secret" not in path.read_text()
    [tool] = [event for event in events_in(path) if event["event"] == "tool"]
    assert (tool["arguments"], tool["reply"]) == (None, None)


def test_times_are_those_of_the_spans_and_lie_within_the_trajectory(path: Path) -> None:
    [trajectory] = run(TraceConfig(backend="file", path=str(path)))
    events = events_in(path)
    [tool] = [event for event in events if event["event"] == "tool"]
    first, last = (event for event in events if event["event"] == "generate")
    assert tool["time"]["end"] - tool["time"]["start"] >= 0.002
    assert first["time"]["end"] <= tool["time"]["start"] <= tool["time"]["end"] <= last["time"]["start"]
    assert trajectory.trace is not None
    assert last["time"]["end"] <= trajectory.trace.seconds
    assert {first["server"], last["server"]} == {"scripted-0"}


def test_validation_refills_and_the_step_come_from_the_run(path: Path) -> None:
    run(
        TraceConfig(backend="file", path=str(path)),
        runs=[{"label": "step=7/refill=2"}, {"label": "val/step=7", "validate": True}, {}],
    )
    began = [event["attributes"] for event in events_in(path) if event["event"] == "began"]
    assert [(each["step"], each["validate"]) for each in began] == [(7, False), (7, True), (None, False)]


def test_the_traced_rows_of_a_step_are_reproducible_and_keep_whole_groups(tmp_path: Path) -> None:
    def chosen(name: str, step: int) -> Counter[int]:
        path = tmp_path / name
        trace = TraceConfig(backend="file", path=str(path), max_samples_per_step_per_worker=2)
        rows = [{"raw_prompt": user("hello"), "index": 100 + number} for number in range(10)]
        run(trace, script=[text_reply("hi")], rows=rows, runs=[{"label": f"step={step}", "n": 3}])
        return Counter(
            event["attributes"]["sample_index"] for event in events_in(path) if event["event"] == "began"
        )

    once = chosen("a", 1)
    assert len(once) == 2
    assert set(once.values()) == {3}
    assert all(index >= 100 for index in once)
    assert chosen("b", 1) == once
    assert any(chosen(f"c{step}", step) != once for step in range(2, 5))


@register("two_branches")
class TwoBranches(AgentLoopBase):
    """Loop that samples two completions of one prompt."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"]) as episode:
            async with episode.branch() as branch:
                await branch.generate(sampling_params)
                second = branch.output()
            await episode.generate(sampling_params)
            return [episode.output(), second]


def test_each_branch_has_events_of_its_own_turns(path: Path) -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return text_reply("the quick brown fox" if request.sampling_params.max_tokens else "the")

    run(
        TraceConfig(backend="file", path=str(path), token2text=True),
        script=script,
        rows=[{"raw_prompt": user("go"), "agent_name": "two_branches"}],
    )
    events = events_in(path)
    ids = sorted({event["trajectory_id"] for event in events})
    assert [id_[-8:] for id_ in ids] == ["branch=0", "branch=1"]
    for id_ in ids:
        assert kinds([event for event in events if event["trajectory_id"] == id_]) == [
            "began",
            "prompt",
            "generate",
            "reward",
            "end",
        ]


def test_a_failed_trajectory_has_the_reason(path: Path) -> None:
    run(
        TraceConfig(backend="file", path=str(path)),
        script=[ScriptedReply(encoded("no"), error="the engine is on fire")],
        max_failed_share=1.0,
    )
    end = events_in(path)[-1]
    assert end["stop_reason"] == "failed"
    assert "on fire" in end["failure"]


@pytest.mark.parametrize("token2text", [False, True])
def test_events_grow_linearly_with_the_tokens(tmp_path: Path, token2text: bool) -> None:
    def bytes_per_token(num_turns: int) -> tuple[float, float]:
        path = tmp_path / f"{num_turns}.jsonl"

        def script(request: ScriptedRequest) -> ScriptedReply:
            return (
                text_reply("done")
                if request.turn == num_turns - 1
                else tool_call_reply("add", a=request.turn, b=2)
            )

        trace = TraceConfig(backend="file", path=str(path), token2text=token2text)
        [trajectory] = run(trace, script=script)
        assert trajectory.output.num_assistant_turns == num_turns
        num_tokens = len(trajectory.output.prompt_ids) + len(trajectory.output.response_ids)
        [document] = read_traces(path)
        return path.stat().st_size / num_tokens, sum(map(len, event_lines(document))) / num_tokens

    stored, rendered = zip(bytes_per_token(10), bytes_per_token(200), strict=True)
    assert stored[1] < 2 * stored[0]
    assert rendered[1] < 2 * rendered[0]
