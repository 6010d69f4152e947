"""Continuations of trajectories from their middle: which states, what is replayed, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from agent_loop.config import RolloutConfig
from agent_loop.config.training import ForkConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.forks import (
    FORKED_TURN,
    Fork,
    as_branches,
    chosen_states,
    find_forks,
    refuse_forks,
)
from agent_loop.rollout.jobs import Job, JobFactory
from agent_loop.rollout.journal import StepKey, open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.instances import OnReplay
from agent_loop.seeds import trajectory_seed
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.token_chunks import FORCED
from agent_loop.training.rollouts import fork_metrics
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, StopReason, as_token_ids
from tests.helpers import encoded, hermes_template, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness
from tests.rollout.journaled import RandomScript, facts

EVERY = ForkConfig(choice="every", continuations=2)


def first_label(group: int) -> tuple[str, int]:
    return "step=1", group


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    return float(len(output.answer) % 3)


class Seeded(Adder):
    """Tool that records the seed of each of its instances."""

    def __init__(self) -> None:
        super().__init__()
        self.on_replay = OnReplay.RERUN
        self.seeds: list[int | None] = []

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await super().create(instance_id, **kwargs)
        self.seeds.append(trajectory_seed("dice"))


class Runs:
    """Rollouts of a worker, and continuations of them, with a different completion for every request."""

    def __init__(self) -> None:
        self.script = RandomScript(seed=0)
        self.tool = Seeded()
        self.harness = WorkerHarness(
            self.script, tools=[self.tool], reward=RewardFunction(reward, timeout_s=None)
        )
        self.jobs = JobFactory(RolloutConfig(seed=3))

    def mains(self, num_rows: int = 2) -> list[Trajectory]:
        rows = [{"raw_prompt": user(f"question {number}")} for number in range(num_rows)]
        return run_virtual(self.harness.worker.run(self.jobs.make(rows, n=2, validate=False, label="step=1")))

    def jobs_of(self, forks: Sequence[Fork], *, n: int = 2) -> list[Job]:
        return self.jobs.make_forks(forks, n=n, label="step=1/forks")

    def continued(self, forks: Sequence[Fork], *, n: int = 2) -> list[Trajectory]:
        return run_virtual(self.harness.worker.run(self.jobs_of(forks, n=n)))


def forks_of(trajectories: Sequence[Trajectory], config: ForkConfig = EVERY) -> list[Fork]:
    forks, reasons = find_forks(trajectories, config=config, origin=first_label)
    assert reasons == []
    return forks


def test_a_continuation_shares_the_tokens_before_the_fork_and_samples_the_others() -> None:
    runs = Runs()
    mains = runs.mains()
    forks = forks_of(mains)
    num_requests = runs.script.num_requests

    continuations = runs.continued(forks)
    branches = as_branches(forks, continuations)

    assert [fork.turn for fork in forks] == [1, 2] * len(mains)
    assert len(branches) == len(continuations) == 2 * len(forks)
    # Three turns each: a continuation before the second turn samples two of them, one before the third turn one.
    assert runs.script.num_requests - num_requests == 2 * len(mains) * (2 + 1)
    for number, branch in enumerate(branches):
        fork = forks[number // 2]
        main = fork.trajectory
        assert (branch.group, branch.rollout) == (main.group, main.rollout)
        assert branch.output.extra_fields[FORKED_TURN] == fork.turn
        num_shared = len(fork.shared)
        shared = zip(branch.output.segments, main.output.segments[:num_shared], strict=False)
        assert all(segment is other for segment, other in shared)
        own, other = (t.output.segments[num_shared:] for t in (branch, main))
        assert [s.token_ids.tolist() for s in own] != [s.token_ids.tolist() for s in other]
        assert branch.output.messages[: 2 * fork.turn + 1] == main.output.messages[: 2 * fork.turn + 1]
    assert [branch.branch for branch in branches] == [1, 2, 3, 4] * len(mains)


@pytest.mark.parametrize(("on_replay", "num_replayed"), [(OnReplay.RERUN, 1 + 2), (OnReplay.RECORDED, 0)])
def test_calls_before_the_fork_run_again_as_the_tool_declares(on_replay: OnReplay, num_replayed: int) -> None:
    runs = Runs()
    runs.tool.on_replay = on_replay
    forks = forks_of(runs.mains(num_rows=1)[:1])
    runs.tool.executed.clear()
    runs.continued(forks, n=1)
    assert len(runs.tool.executed) == num_replayed + 1  # and one call after the first fork


def test_a_continuation_has_the_seed_of_its_trajectory_for_tools_and_its_own_for_completions() -> None:
    runs = Runs()
    mains = runs.mains()
    seeds = list(runs.tool.seeds)
    runs.tool.seeds.clear()
    forks = forks_of(mains[-1:])
    runs.continued(forks)
    assert len(set(seeds)) == len(mains)
    [seed] = set(runs.tool.seeds)
    assert seed in seeds
    jobs = runs.jobs_of(forks)
    assert len({job.seed for job in jobs}) == len(jobs)


def test_a_continuation_that_was_not_scored_or_differs_before_the_fork_is_left_out() -> None:
    runs = Runs()
    forks = forks_of(runs.mains(num_rows=1)[:1])
    first, second, *rest = runs.continued(forks)
    prompt, *others = second.output.segments
    changed = structs.replace(prompt, token_ids=prompt.token_ids + 1)
    differs = structs.replace(second, output=replace(second.output, segments=[changed, *others]))
    branches = as_branches(forks, [structs.replace(first, reward=None), differs, *rest])
    assert [branch.branch for branch in branches] == [1, 2]
    assert {branch.output.extra_fields[FORKED_TURN] for branch in branches} == {2}


def test_the_cost_counts_the_tokens_that_were_sampled_anew() -> None:
    runs = Runs()
    forks = forks_of(runs.mains(num_rows=1))
    continuations = runs.continued(forks)
    metrics = fork_metrics(forks, continuations, as_branches(forks, continuations)[1:])
    assert metrics["forks/model_tokens"] == sum(
        c.output.num_model_tokens - sum(len(s) for s in forks[c.group].shared if s.origin is Origin.MODEL)
        for c in continuations
    )
    assert metrics["forks/states"] == len(forks)
    assert metrics["forks/lost_share"] == pytest.approx(1 / len(continuations))


def test_the_journal_keeps_continuations_that_ended_and_runs_the_others_again(tmp_path: Path) -> None:
    runs = Runs()
    forks = forks_of(runs.mains())
    rows = [fork.trajectory.row for fork in forks]
    key = StepKey.of([fork.identity for fork in forks], step=1, weight_version=0, num_samples=2, settings={})

    async def run(num_before_crash: int | None) -> list[Trajectory]:
        found: list[Trajectory] = []
        crash = asyncio.Event()

        def note(trajectory: Trajectory) -> None:
            found.append(trajectory)
            if len(found) == num_before_crash:
                crash.set()

        async with open_journal(tmp_path / "forks.journal", key=key, rows=rows, resume=True) as journal:
            ended, jobs = journal.divide(runs.jobs_of(forks))
            found += ended
            await run_while(runs.harness.worker.run(jobs, on_trajectory=note), condition=crash.wait())
        return sorted(found, key=lambda t: (t.group, t.rollout))

    before = run_virtual(run(5))
    after = run_virtual(run(None))

    assert len(before) == 5
    assert len(after) == 2 * len(forks)
    of_after = {(t.group, t.rollout): t for t in after}
    for trajectory in before:
        assert facts(of_after[trajectory.group, trajectory.rollout]) == facts(trajectory)
    assert len(as_branches(forks, after)) == len(after)


# -- the choice of states ----------------------------------------------------------------------------------------------


def output_of(
    *turns: Sequence[float], has_logprobs: bool = True, extras: Mapping[str, Any] | None = None
) -> AgentLoopOutput:
    segments = [Segment(as_token_ids([3]), Origin.PROMPT)]
    for logprobs in turns:
        values = np.array(logprobs, np.float32) if has_logprobs else None
        ids = as_token_ids([5] * len(logprobs))
        segments.append(Segment(ids, Origin.MODEL, values, 0, extras=extras or {}))
        segments.append(Segment(as_token_ids([6]), Origin.TOOL))
    return AgentLoopOutput(segments=segments)


SURE, UNSURE, LOST = [-0.1, -0.1], [-0.1, -0.9], [-2.0, -2.0]


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        ({}, [2]),
        ({"max_turns": 2}, [1, 2]),
        ({"max_turns": 9}, [1, 2, 3]),
        ({"both_sides": True}, [1]),
        ({"both_sides": True, "max_turns": 2}, [1, 2, 3]),
        ({"choice": "every"}, [1, 2, 3]),
        ({"choice": "every", "every": 2}, [2]),
        ({"choice": "every", "every": 2, "both_sides": True}, [2, 3]),
        ({"choice": "every", "every": 4}, []),
    ],
)
def test_states_are_chosen_before_uncertain_turns_or_regularly(
    settings: dict[str, Any], states: list[int]
) -> None:
    config = ForkConfig.model_validate(settings)
    assert chosen_states(output_of(LOST, SURE, LOST, SURE), config) == states


def test_equally_uncertain_turns_are_chosen_from_the_first_on_and_forced_tokens_do_not_count() -> None:
    assert chosen_states(output_of(SURE, SURE, UNSURE, UNSURE), ForkConfig()) == [2]
    forced = {FORCED: np.array([0, 1], np.uint8)}
    assert chosen_states(output_of(SURE, UNSURE, [-0.2, -0.1], extras=forced), ForkConfig()) == [2]


def test_the_choice_of_uncertain_turns_needs_logprobs() -> None:
    output = output_of(SURE, SURE, has_logprobs=False)
    with pytest.raises(DataError, match=r"algorithm\.fork\.choice=every"):
        chosen_states(output, ForkConfig())
    assert chosen_states(output, EVERY) == [1]


def test_failed_unscored_and_short_trajectories_are_not_forked_and_branches_are_counted() -> None:
    main = Runs().mains(num_rows=1)[0]
    failed = replace(main.output, stop_reason=StopReason.FAILED)
    short = Trajectory(output_of(SURE), main.row, 0, 0, reward=1.0, reward_extra={})
    quiet = [structs.replace(main, reward=None), structs.replace(main, output=failed), short]
    assert find_forks(quiet, config=EVERY, origin=first_label) == ([], [])
    branch = structs.replace(main, branch=1)
    forks, [reason] = find_forks([branch, main], config=EVERY, origin=first_label)
    assert [fork.trajectory for fork in forks] == [main, main]
    assert "one of several branches" in reason


# -- what is refused before the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_replay", [OnReplay.RESTART, OnReplay.ONCE])
def test_a_tool_or_an_interaction_whose_state_cannot_be_restored_is_refused_by_name(
    on_replay: OnReplay,
) -> None:
    tool, interaction = Adder(), ScriptedInteraction(["Go on."])
    tool.on_replay, interaction.on_replay = OnReplay.RERUN, on_replay
    context = WorkerHarness([], tools=[tool], interactions={"guide": interaction}).worker._context
    with pytest.raises(ConfigError, match=f"interaction 'guide' has on_replay='{on_replay}'"):
        refuse_forks(context, has_batch_reward=False)
    tool.on_replay = on_replay
    with pytest.raises(ConfigError, match=f"tool 'add' has on_replay='{on_replay}'"):
        refuse_forks(context, has_batch_reward=False)
    tool.on_replay, interaction.on_replay = OnReplay.RECORDED, OnReplay.RERUN
    refuse_forks(context, has_batch_reward=False)
    with pytest.raises(ConfigError, match=r"reward\.batch"):
        refuse_forks(context, has_batch_reward=True)


async def test_a_manager_continues_trajectories_of_its_own_runs() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        if encoded("<tool_response>")[0] in request.prompt_ids:
            return ScriptedReply(encoded(f"done {request.sampling_params.seed}<|im_end|>"))
        return tool_call_reply("multiply", a=1, b=2)

    settings = {
        "prompt_length": 800,
        "response_length": 200,
        "agent": {"default_agent_loop": "tool_agent", "num_workers": 2},
        "multi_turn": {"tools": ["examples.chain.task:multiply"], "format": "hermes"},
    }
    config = RolloutConfig.model_validate(settings)
    async with AgentLoopManager(
        config, servers=[ScriptedServer(script)], template=hermes_template()
    ) as manager:
        manager.check_forks()
        mains = await manager.run([{"raw_prompt": user("1 + 1?")}], n=2, label="step=1")
        forks = forks_of([structs.replace(main, reward=1.0) for main in mains])
        seen: list[Trajectory] = []
        found = await manager.run_forks(forks, n=3, label="step=1/forks", on_trajectory=seen.append)
        assert len(seen) == 6
        assert [(t.group, t.rollout) for t in found] == [(g, r) for g in range(2) for r in range(3)]
        assert all(t.output.failure is None for t in found)
        scored = [structs.replace(t, reward=0.0) for t in found]
        assert len(as_branches(forks, scored)) == 6
