"""Reading of files that the `file` backend wrote."""

from __future__ import annotations

import itertools
import json
import logging
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
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.tracing.events import TraceAttributes
from agent_loop.tracing.json_traces import FinishedTrajectory, JsonTrace, account_from_json, to_json_traces
from agent_loop.tracing.stored import event_lines, read_accounts
from agent_loop.tracing.token_decoder import BytesDecoder, make_token_decoder
from agent_loop.tracing.writers.file import line_of
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from tests.helpers import hermes_template, small_tokenizer, text_reply, user
from tests.tracing.harness import events_in, run


@register("many_branches")
class ManyBranches(AgentLoopBase):
    """Loop whose branches have different texts of different lengths."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"]) as episode:
            outputs: list[AgentLoopOutput] = []
            for _ in range(row["num_branches"]):
                async with episode.branch() as branch:
                    await branch.generate(sampling_params)
                    outputs.append(branch.output())
            return outputs


def many_branches_script(request: ScriptedRequest) -> ScriptedReply:
    return text_reply("the" * (1 + next(MANY) % 40))


MANY = itertools.count()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.jsonl"


def json_trace_of(trajectory: Trajectory, *, template: ChatTemplate | None = None) -> JsonTrace:
    """Return a trajectory's JSON document as the writer receives it."""
    assert trajectory.trace is not None
    attributes = TraceAttributes("step=3/group=0/rollout=0", 3, 0, 0, False, "tool_agent", "")
    decode_runs = None if template is None else make_token_decoder(template)
    [form] = to_json_traces(
        [FinishedTrajectory(trajectory, attributes, trajectory.trace)], decode_runs=decode_runs
    )
    return form


@pytest.mark.parametrize("token2text", [False, True])
def test_a_stored_trajectory_has_the_events_of_the_live_one(path: Path, token2text: bool) -> None:
    [trajectory] = run(TraceConfig(backend="file", path=str(path), token2text=token2text))
    live = account_from_json(json_trace_of(trajectory, template=hermes_template() if token2text else None))
    [stored] = read_accounts(path)
    assert list(event_lines(stored)) == list(event_lines(live))
    assert len(list(event_lines(stored))) > 8


def test_texts_are_those_of_the_tokenizer() -> None:
    template = hermes_template()
    vocabulary = template.tokenizer.backend_tokenizer.get_vocab_size()
    random = np.random.default_rng(0)
    runs = [random.integers(0, vocabulary + 50, length).astype(np.int32) for length in (1, 0, 3, 500, 2)]
    decode_runs = make_token_decoder(template)
    assert isinstance(decode_runs, BytesDecoder)
    expected = [
        template.tokenizer.backend_tokenizer.decode(r.tolist(), skip_special_tokens=False) for r in runs
    ]
    assert decode_runs(runs) == expected
    assert decode_runs([]) == []
    assert decode_runs([runs[1]]) == [""]
    others = make_token_decoder(ChatTemplate(small_tokenizer(), tool_parser="hermes", encoder="tokenizers"))
    assert not isinstance(others, BytesDecoder)
    assert others(runs) == expected


def test_an_incomplete_last_line_is_skipped_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(TraceConfig(backend="file", path=str(path)), runs=[{"n": 3}])
    path.write_bytes(path.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING):
        assert len(list(read_accounts(path))) == 2
    assert "line 3 is incomplete" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"event": "began"}', "line 1 is not a trajectory that rollout.trace.backend=file wrote"),
        ("what?", "line 1 is not a trajectory"),
        ('{"version": 99}', "line 1 has version 99, but this agent-loop reads 1; upgrade agent-loop"),
    ],
)
def test_an_invalid_line_is_rejected_with_its_number(path: Path, line: str, message: str) -> None:
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        list(read_accounts(path))


def test_the_error_for_a_missing_file_names_it(path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_accounts(path))


def test_values_that_json_cannot_represent_are_described(path: Path) -> None:
    [trajectory] = run(TraceConfig())
    strange = {"half": "a \ud83d b", "large": 2**70, "infinite": float("inf"), "object": object(), 3: (1, 2)}
    path.write_bytes(line_of(json_trace_of(structs.replace(trajectory, reward=1.0, reward_extra=strange))))
    [stored] = read_accounts(path)
    described = str(stored.reward_extra.pop("object"))
    assert described.startswith("<object object at")
    assert stored.reward_extra == {"half": "a ? b", "large": 2.0**70, "infinite": None, "3": [1, 2]}


def test_a_branch_does_not_store_the_spans_of_all_branches(path: Path) -> None:
    def bytes_per_branch(num_branches: int) -> float:
        file = path.with_name(f"{num_branches}.jsonl")
        trace = TraceConfig(backend="file", path=str(file))
        row = {"raw_prompt": user("go"), "agent_name": "many_branches", "num_branches": num_branches}
        run(trace, script=many_branches_script, rows=[row])
        assert len(list(read_accounts(file))) == num_branches
        return file.stat().st_size / num_branches

    assert bytes_per_branch(40) < 1.3 * bytes_per_branch(4)


def test_the_command_prints_events_of_the_requested_trajectories(path: Path) -> None:
    run(TraceConfig(backend="file", path=str(path)), runs=[{"label": "step=1"}, {"label": "step=2", "n": 2}])
    result = CliRunner().invoke(app, ["traces", str(path), "--trajectory", "step=2/"], catch_exceptions=False)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert {event["trajectory_id"] for event in events} == {
        "step=2/group=0/rollout=0",
        "step=2/group=0/rollout=1",
    }
    assert events == [event for event in events_in(path) if "step=2" in event["trajectory_id"]]
