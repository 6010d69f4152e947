"""Trajectories that are cancelled and resumed, compared with trajectories that run without a cancellation."""

from __future__ import annotations

import asyncio
import pickle
import random
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.errors import EpisodeError
from agent_loop.recording.row_log import ReplayMismatch
from agent_loop.recording.values import pack
from agent_loop.runtime.instances import OnReplay
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind
from agent_loop.types import Origin, StopReason
from tests.harness import thinned
from tests.helpers import call_text, encoded
from tests.loops.partials import TOKEN_S, PartialRunner, facts, logprob_at, random_turns

TOOLS = {
    "look": (OnReplay.RECORDED, 0.4),
    "book": (OnReplay.ONCE, 0.7),
    "step": (OnReplay.RERUN, 0.3),
}


def random_runner(seed: int) -> Any:
    """Return a function that creates the same runner on every call."""
    rng = random.Random(seed)
    turns = random_turns(rng, many=["look", "book"], one="step")
    kwargs: dict[str, Any] = {
        "replies": ["Go on.", "And then?"][: rng.randint(0, 2)],
        "num_servers": rng.choice([1, 2]),
        "max_parallel_calls": rng.choice([1, 2, 3]),
        "response_length": rng.choice([60, 150, 300, 4096]),
        "max_turn_tokens": rng.choice([None, None, 50]),
    }
    return lambda: PartialRunner(turns, tools=TOOLS, **kwargs)


@pytest.mark.parametrize("first_seed", thinned(range(0, 200, 20), step=5))
def test_a_trajectory_cancelled_anywhere_and_resumed_equals_one_without_a_cancellation(
    first_seed: int,
) -> None:
    num_cut = 0
    for seed in range(first_seed, first_seed + 20):
        make = random_runner(seed)
        whole_runner, runner = make(), make()
        whole = run_virtual(whole_runner.run())
        rng = random.Random(-1 - seed)
        cuts = [rng.uniform(0, whole.metrics.total) / (n + 1) for n in range(rng.randint(1, 4))]
        output, parts = run_virtual(runner.run_in_parts(cuts))
        num_cut += len(parts)
        assert facts(output) == facts(whole), seed
        for tool in ("look", "book"):
            assert runner.counts.ended[tool] == whole_runner.counts.ended[tool], seed
        assert runner.counts.started["book"] == whole_runner.counts.started["book"], seed
        assert_grows([*parts, output])
    assert num_cut >= 20


def assert_grows(outputs: list[AgentLoopOutput]) -> None:
    """Check that each part contains all tokens of the previous part, with the log-probs of their positions."""
    for before, after in pairwise(outputs):
        num_tokens = len(before.response_ids)
        assert before.response_ids.tolist() == after.response_ids[:num_tokens].tolist()
        assert before.extra_fields["is_cancel"] is True
        assert before.extra_fields["state"] in ("generating", "processing_tools", "interacting")
    last = outputs[-1]
    assert last.response_logprobs is not None
    num_prompt = len(last.prompt_ids)
    expected = [
        logprob_at(num_prompt + position) if mask else 0.0 for position, mask in enumerate(last.response_mask)
    ]
    np.testing.assert_allclose(last.response_logprobs, np.asarray(expected, np.float32))


def cut_in(phase: str, runner: PartialRunner) -> AgentLoopOutput:
    """Return the first part of a trajectory, cancelled while it samples its first turn or runs its calls."""
    moments = {"completion": 10.5 * TOKEN_S, "calls": len(encoded(f"{ASKING}<|im_end|>")) * TOKEN_S + 0.5}
    return run_virtual(runner.run(cancel_after_s=moments[phase]))


ASKING = f"I ask. {call_text('book', a=2)}{call_text('look', a=1)}"
ASKING_TURNS = [ASKING, "It is done."]


def test_an_aborted_completion_resumes_from_its_tokens_and_its_calls_are_parsed_as_a_whole() -> None:
    runner = PartialRunner(ASKING_TURNS, tools=TOOLS)
    part = cut_in("completion", runner)
    assert (part.stop_reason, part.extra_fields["state"]) == (StopReason.CANCELLED, "generating")
    assert len(part.response_ids) == 10
    output = run_virtual(runner.run(partial_output=part))
    assert runner.servers[0].requests[1].prompt_ids.tolist() == [*part.prompt_ids, *part.response_ids]
    assert [m["role"] for m in output.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert runner.counts.ended == {"book": 1, "look": 1}
    assert output.extra_fields == {
        "is_cancel": False,
        "state": "terminated",
        "turn_scores": [],
        "tool_rewards": list(output.tool_rewards),
    }


def test_a_completion_on_both_sides_of_a_weight_update_is_one_turn_of_two_segments() -> None:
    async def scenario() -> tuple[AgentLoopOutput, AgentLoopOutput]:
        runner = PartialRunner(ASKING_TURNS, tools=TOOLS)
        part = await runner.run(cancel_after_s=10.5 * TOKEN_S)
        await runner.server_manager.pool.update_weights([], weight_version=7)
        return part, await runner.run(partial_output=part)

    part, output = run_virtual(scenario())
    by_model = [(len(s), s.weight_version) for s in output.segments if s.origin is Origin.MODEL]
    num_first = len(encoded(f"{ASKING}<|im_end|>"))
    assert by_model[:2] == [(10, 0), (num_first - 10, 7)]
    assert output.num_assistant_turns == 2
    versions = output.weight_versions[output.response_mask == 1]
    assert versions.tolist() == [0] * len(part.response_ids) + [7] * (len(versions) - 10)
    assert_grows([part, output])


def test_each_token_has_the_weight_version_that_sampled_it() -> None:
    async def scenario(seed: int) -> tuple[list[AgentLoopOutput], AgentLoopOutput]:
        runner, rng = random_runner(seed)(), random.Random(seed)
        parts: list[AgentLoopOutput] = []
        output: AgentLoopOutput | None = None
        for version in range(1, 4):
            output = await runner.run(cancel_after_s=rng.uniform(1, 6), partial_output=output)
            parts.append(output)
            await runner.server_manager.pool.update_weights([], weight_version=version)
        return parts, await runner.run(partial_output=output)

    for seed in range(20):
        parts, output = run_virtual(scenario(seed))
        ends = [int(part.response_mask.sum()) for part in [*parts, output]]
        expected = np.repeat(range(len(ends)), np.diff([0, *ends]))
        assert output.weight_versions[output.response_mask == 1].tolist() == expected.tolist()


def test_a_call_that_may_run_only_once_ends_before_its_trajectory_is_cancelled_and_other_calls_are_aborted() -> (
    None
):
    runner = PartialRunner(ASKING_TURNS, tools=TOOLS)
    part = cut_in("calls", runner)
    assert part.extra_fields["state"] == "processing_tools"
    assert (runner.counts.started, runner.counts.ended) == ({"book": 1, "look": 1}, {"book": 1})
    output = run_virtual(runner.run(partial_output=part))
    assert runner.counts.started == {"book": 1, "look": 2}
    assert [message["content"] for message in output.messages[2:4]] == ["2 done", "1 done"]
    assert output.tool_rewards == (0.25, 0.25)


def test_a_call_that_may_run_only_once_and_does_not_end_in_time_is_answered_with_an_error() -> None:
    runner = PartialRunner(ASKING_TURNS, tools={**TOOLS, "book": (OnReplay.ONCE, 100.0)})
    output = run_virtual(runner.run(partial_output=cut_in("calls", runner)))
    assert runner.counts.started["book"] == 1
    assert [incident.kind for incident in output.incidents] == [IncidentKind.INTERRUPTED_CALL]
    assert "may or may not have taken effect" in output.messages[2]["content"]


def test_queued_calls_are_not_started_after_a_cancellation() -> None:
    runner = PartialRunner(
        [f"{call_text('book', a=1)}{call_text('book', a=2)}", "Done."], tools=TOOLS, max_parallel_calls=1
    )
    num_tokens = len(encoded(f"{call_text('book', a=1)}{call_text('book', a=2)}<|im_end|>"))
    part = run_virtual(runner.run(cancel_after_s=num_tokens * TOKEN_S + 0.5))
    assert runner.counts.started == {"book": 1}
    output = run_virtual(runner.run(partial_output=part))
    assert runner.counts.ended == {"book": 2}
    assert not output.incidents


def test_a_trajectory_whose_tool_cannot_be_replayed_starts_again_and_keeps_the_incident() -> None:
    runner = PartialRunner(
        ASKING_TURNS, tools={**TOOLS, "look": (OnReplay.RESTART, 0.4), "book": (OnReplay.RERUN, 0.1)}
    )
    again = run_virtual(runner.run(partial_output=cut_in("calls", runner), cancel_after_s=8 * TOKEN_S + 0.05))
    output = run_virtual(runner.run(partial_output=again))
    for each in (again, output):
        [incident] = [i for i in each.incidents if i.kind is IncidentKind.RESTARTED]
        assert "its on_replay does not allow a replay" in incident.detail
    assert output.stop_reason is StopReason.ANSWERED
    assert len(again.response_ids) == 8


def test_a_trajectory_that_cannot_be_replayed_and_used_a_once_only_tool_is_refused() -> None:
    runner = PartialRunner(ASKING_TURNS, tools={**TOOLS, "look": (OnReplay.RESTART, 0.4)})
    part = cut_in("calls", runner)
    with pytest.raises(ReplayMismatch, match="tool 'book' was used and may be used only once"):
        run_virtual(runner.run(partial_output=part))
    assert runner.counts.started["book"] == 1


def test_another_process_can_resume_a_cancelled_trajectory(tmp_path: Path) -> None:
    runner = PartialRunner(ASKING_TURNS, tools=TOOLS)
    whole, part = run_virtual(PartialRunner(ASKING_TURNS, tools=TOOLS).run()), cut_in("calls", runner)
    (tmp_path / "part").write_bytes(pickle.dumps(part))
    code = f"""
        import pickle
        from pathlib import Path
        from agent_loop.testing import run_virtual
        from tests.loops.test_partial import ASKING_TURNS, TOOLS, PartialRunner
        folder, runner = Path({str(tmp_path)!r}), PartialRunner(ASKING_TURNS, tools=TOOLS)
        part = pickle.loads((folder / "part").read_bytes())
        output = run_virtual(runner.run(partial_output=part))
        (folder / "whole").write_bytes(pickle.dumps((output, runner.counts.ended)))
    """
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=root, timeout=60)
    output, ended = pickle.loads((tmp_path / "whole").read_bytes())
    assert facts(output) == facts(whole)
    assert ended == {"look": 1}


@pytest.mark.parametrize("data", [None, [b"nonsense"], [pack({"is": "unknown"})]])
def test_an_output_that_cannot_be_resumed_is_refused(data: Any) -> None:
    fields = {} if data is None else {"is_cancel": True, "agent_data": data}
    broken = AgentLoopOutput(segments=(), stop_reason=StopReason.CANCELLED, extra_fields=fields)
    with pytest.raises(EpisodeError, match="agent_data"):
        run_virtual(PartialRunner(ASKING_TURNS, tools=TOOLS).run(partial_output=broken))


def test_a_trajectory_whose_row_changed_starts_again() -> None:
    runner = PartialRunner(["Hm. " * 20, "Done."], tools=TOOLS, response_length=1000)
    part = run_virtual(runner.run(cancel_after_s=1))
    other = PartialRunner(["Hm. " * 20, "Done."], tools=TOOLS, response_length=900)
    output = run_virtual(other.run(partial_output=part))
    assert [incident.kind for incident in output.incidents] == [IncidentKind.RESTARTED]
    assert "the loop is not deterministic, or its code was changed" in output.incidents[0].detail


def test_a_server_that_does_not_answer_an_abort_costs_its_tokens_and_a_few_seconds() -> None:
    async def scenario() -> tuple[AgentLoopOutput, float]:
        runner = PartialRunner(["Hm. " * 60], tools=TOOLS)

        async def abort(request_id: str) -> None:
            await asyncio.Event().wait()

        runner.servers[0].abort = abort
        started = asyncio.get_running_loop().time()
        return await runner.run(cancel_after_s=1), asyncio.get_running_loop().time() - started

    part, seconds = run_virtual(scenario())
    assert (part.stop_reason, len(part.response_ids)) == (StopReason.CANCELLED, 0)
    assert seconds < 10
