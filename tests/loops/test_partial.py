"""Trajectories that are cancelled and resumed: with any tools, with tools whose state is lost, and on an engine."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import EpisodeError
from agent_loop.loops.base import LoopContext
from agent_loop.loops.partial import AsyncPartialToolAgentLoop
from agent_loop.recording.row_log import ReplayMismatch
from agent_loop.recording.values import pack
from agent_loop.runtime.instances import OnReplay
from agent_loop.servers.embedded import EmbeddedServer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, IncidentKind
from agent_loop.types import StopReason
from tests.harness import thinned
from tests.helpers import call_text, encoded, hermes_template, small_tokenizer, user
from tests.loops.partials import TOKEN_S, CountingTool, PartialRunner, facts, logprob_at, random_turns
from tests.servers import tiny_embedded as tiny

TOOLS = {"look": (OnReplay.RECORDED, 0.4), "book": (OnReplay.ONCE, 0.7), "step": (OnReplay.RERUN, 0.3)}


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
def test_a_trajectory_cancelled_anywhere_and_resumed_equals_an_uncancelled_one(first_seed: int) -> None:
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


def cut_in_calls(runner: PartialRunner) -> AgentLoopOutput:
    """Return the first part of a trajectory, cancelled while it runs the calls of its first turn."""
    seconds = len(encoded(f"{ASKING}<|im_end|>")) * TOKEN_S + 0.5
    return run_virtual(runner.run(cancel_after_s=seconds))


ASKING = f"I ask. {call_text('book', a=2)}{call_text('look', a=1)}"
ASKING_TURNS = [ASKING, "It is done."]


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


def test_a_once_only_call_ends_before_its_trajectory_is_cancelled_and_other_calls_are_aborted() -> None:
    runner = PartialRunner(ASKING_TURNS, tools=TOOLS)
    part = cut_in_calls(runner)
    assert part.extra_fields["state"] == "processing_tools"
    assert (runner.counts.started, runner.counts.ended) == ({"book": 1, "look": 1}, {"book": 1})
    output = run_virtual(runner.run(partial_output=part))
    assert runner.counts.started == {"book": 1, "look": 2}
    assert [message["content"] for message in output.messages[2:4]] == ["2 done", "1 done"]
    assert output.tool_rewards == (0.25, 0.25)


def test_a_call_that_may_run_only_once_and_does_not_end_in_time_is_answered_with_an_error() -> None:
    runner = PartialRunner(ASKING_TURNS, tools={**TOOLS, "book": (OnReplay.ONCE, 100.0)})
    output = run_virtual(runner.run(partial_output=cut_in_calls(runner)))
    assert runner.counts.started["book"] == 1
    assert [incident.kind for incident in output.incidents] == [IncidentKind.INTERRUPTED_CALL]
    assert "may or may not have taken effect" in output.messages[2]["content"]


def test_a_trajectory_that_cannot_be_replayed_and_used_a_once_only_tool_is_refused() -> None:
    runner = PartialRunner(ASKING_TURNS, tools={**TOOLS, "look": (OnReplay.RESTART, 0.4)})
    part = cut_in_calls(runner)
    with pytest.raises(ReplayMismatch, match="tool 'book' was used and may be used only once"):
        run_virtual(runner.run(partial_output=part))
    assert runner.counts.started["book"] == 1


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


LATENCY_S = 0.4
LOOK = f"I look. {call_text('look', a=0)}"
NOT_RESTORABLE = {"look": (OnReplay.RESTART, LATENCY_S)}


class Judge(CountingTool):
    """Tool whose reward is the number of calls of its trajectory."""

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        self._counts.started["verdict"] += 1
        return float(self.open[instance_id])


def resumed_after(
    *sampled: str, turns: Sequence[str], latency_s: float = LATENCY_S, **options: Any
) -> tuple[AgentLoopOutput, AgentLoopOutput, PartialRunner]:
    """Cancel a trajectory a few tokens after these turns, each of which calls a tool, and resume it."""
    runner = PartialRunner(turns, **{"tools": NOT_RESTORABLE, **options})
    num_tokens = sum(len(encoded(f"{turn}<|im_end|>")) for turn in sampled)
    seconds = (num_tokens + 3.5) * TOKEN_S + len(sampled) * latency_s
    part = run_virtual(runner.run(cancel_after_s=seconds))
    return part, run_virtual(runner.run(partial_output=part)), runner


def restarts(output: AgentLoopOutput) -> list[str]:
    return [i.detail for i in output.incidents if i.kind is IncidentKind.RESTARTED]


@pytest.mark.parametrize(
    ("on_replay", "num_restarts"), [("recorded", 0), ("rerun", 0), ("once", 1), ("restart", 1)]
)
def test_tools_may_be_called_later_if_they_cannot_read_lost_state(on_replay: str, num_restarts: int) -> None:
    turns = [LOOK, f"And now. {call_text('book', a=0)}", "It is done."]
    tools = {**NOT_RESTORABLE, "book": (OnReplay(on_replay), LATENCY_S)}
    _, output, runner = resumed_after(LOOK, turns=turns, tools=tools)
    assert len(restarts(output)) == num_restarts
    assert output.stop_reason is StopReason.ANSWERED
    assert runner.counts.started == {"book": 1, "look": 1 + num_restarts}


def test_a_tool_reward_is_calculated_at_the_cancellation_and_counts_at_the_end() -> None:
    turns = [LOOK, LOOK, "It is done."]
    part, _, _ = resumed_after(LOOK, LOOK, turns=turns, tool_class=Judge)
    runner = PartialRunner(turns, tools=NOT_RESTORABLE, tool_class=Judge)
    again = run_virtual(runner.run(partial_output=part, cancel_after_s=2.5 * TOKEN_S))
    assert again.stop_reason is StopReason.CANCELLED
    assert part.reward_score is again.reward_score is None
    output = run_virtual(runner.run(partial_output=again))
    assert output.reward_score == 2.0
    assert not restarts(output)
    assert not runner.counts.started, "neither a call nor the reward runs again"


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_any_cancelled_and_resumed_trajectory_ends_as_one_without_a_cancellation(first_seed: int) -> None:
    num_cut = num_restarts = 0
    tools = {**NOT_RESTORABLE, "book": (OnReplay.RESTART, 0.7), "step": (OnReplay.RERUN, 0.3)}
    for seed in range(first_seed, first_seed + 20):
        rng = random.Random(seed)
        turns = random_turns(rng, many=["look", "book"], one="step")
        runner = PartialRunner(turns, tools=tools, tool_class=Judge)
        whole = run_virtual(PartialRunner(turns, tools=tools, tool_class=Judge).run())
        cuts = [rng.uniform(0, whole.metrics.total) for _ in range(rng.randint(1, 3))]
        output, parts = run_virtual(runner.run_in_parts(cuts))
        num_cut += len(parts)
        num_restarts += bool(restarts(output))
        expected, found = facts(whole), facts(output)
        incidents = [i for i in output.incidents if i.kind is not IncidentKind.RESTARTED]
        found["incidents"] = expected["incidents"] if incidents == list(whole.incidents) else incidents
        assert found == expected, seed
        assert output.reward_score == whole.reward_score, seed
    assert num_cut > num_restarts > 0


MODEL = tiny.tiny_model(vocab_size=len(small_tokenizer()))
OTHER = tiny.tiny_model(vocab_size=len(small_tokenizer()), seed=1)


def make_loop(server: EmbeddedServer) -> AsyncPartialToolAgentLoop:
    limits = EpisodeLimits(prompt_length=100, response_length=120)
    servers = AsyncLLMServerManager([server])
    return AsyncPartialToolAgentLoop(
        LoopContext(server_manager=servers, template=hermes_template(), limits=limits)
    )


async def speak(server: EmbeddedServer, **options: Any) -> AgentLoopOutput:
    return await make_loop(server).run({"temperature": 0}, raw_prompt=user("Speak."), **options)


async def cut_after(num_tokens: int, server: EmbeddedServer) -> AgentLoopOutput:
    event = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(speak(server, cancellation_event=event))
        await tiny.wait_until_decoded(server, num_tokens)
        event.set()
    return running.result()


async def test_under_new_weights_each_token_has_the_logprob_and_the_version_of_its_model() -> None:
    async with tiny.serving(copy.deepcopy(MODEL)) as server:
        part = await cut_after(20, server)
        await server.update_weights(tiny.weights_of(OTHER).items(), weight_version=3)
        output = await speak(server, partial_output=part)
    num_old = len(part.response_ids)
    ids = output.response_ids.tolist()
    assert output.weight_versions.tolist() == [0] * num_old + [3] * (len(ids) - num_old)
    expected = [
        *tiny.full_forward_logprobs(MODEL, output.prompt_ids, ids)[:num_old],
        *tiny.full_forward_logprobs(OTHER, output.prompt_ids, ids)[num_old:],
    ]
    assert output.response_logprobs is not None
    np.testing.assert_allclose(output.response_logprobs, expected, atol=1e-4)
