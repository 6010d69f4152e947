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
from agent_loop.tracing.documents import trace_document
from agent_loop.tracing.trace_files import line_of, read_traces
from agent_loop.tracing.tracer import make_token_decoder
from agent_loop.trajectory import AgentLoopOutput
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


def test_texts_are_those_of_the_tokenizer() -> None:
    template = hermes_template()
    vocabulary = template.tokenizer.backend_tokenizer.get_vocab_size()
    random = np.random.default_rng(0)
    others = ChatTemplate(small_tokenizer(), tool_parser="hermes", encoder="tokenizers")
    for length in (1, 0, 3, 500):
        ids = random.integers(0, vocabulary + 50, length).astype(np.int32)
        expected = template.tokenizer.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert make_token_decoder(template)(ids) == expected
        assert make_token_decoder(others)(ids) == expected


def test_an_incomplete_last_line_is_skipped_with_a_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(TraceConfig(backend="file", path=str(path)), runs=[{"n": 3}])
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
def test_an_invalid_line_is_rejected_with_its_number(path: Path, line: str, message: str) -> None:
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        list(read_traces(path))


def test_values_that_json_cannot_represent_are_described(path: Path) -> None:
    [trajectory] = run(TraceConfig())
    strange = {"half": "a \ud83d b", "large": 2**70, "infinite": float("inf"), "object": object(), 3: (1, 2)}
    scored = structs.replace(trajectory, reward=1.0, reward_extra=strange)
    path.write_bytes(line_of(trace_document(scored, {"trajectory_id": "group=0"}, decode=None)))
    [stored] = read_traces(path)
    assert stored["reward_extra"].pop("object").startswith("<object object at")
    assert stored["reward_extra"] == {"half": "a ? b", "large": 2.0**70, "infinite": None, "3": [1, 2]}


def test_a_branch_does_not_store_the_spans_of_all_branches(path: Path) -> None:
    def bytes_per_branch(num_branches: int) -> float:
        file = path.with_name(f"{num_branches}.jsonl")
        trace = TraceConfig(backend="file", path=str(file))
        row = {"raw_prompt": user("go"), "agent_name": "many_branches", "num_branches": num_branches}
        run(trace, script=many_branches_script, rows=[row])
        assert len(list(read_traces(file))) == num_branches
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
