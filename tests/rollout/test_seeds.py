"""The seed of a rollout determines its samples, independent of the order of its requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import AgentConfig, RolloutConfig
from agent_loop.episode import Episode
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.journal import open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.concurrency import run_together
from agent_loop.seeds import CompletionSeeds, derived_seed, trajectory_seed
from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import as_token_ids
from tests.helpers import encoded, hermes_template, user
from tests.rollout.journaled import key_of

ROWS = [{"raw_prompt": user(f"question {n}")} for n in range(3)]


Tokens = list[list[int]]


class PlainServer(ScriptedServer):
    abilities = ScriptedServer.abilities | {Ability.SEED}


class SeededServer(PlainServer):
    """Server that samples tokens from the seed and their positions in the completion, at random speed."""

    abilities = PlainServer.abilities | {Ability.FREE_SEEDS}


def sample(request: ScriptedRequest) -> ScriptedReply:
    params = request.sampling_params
    assert params.seed is not None
    tokens = [100 + derived_seed(params.seed, place) % 200 for place in range(8)]
    return ScriptedReply(tokens[params.num_sampled :], stops=False, latency_s=random.uniform(1, 20))


@register("seeds_in_episodes")
class InEpisodes(AgentLoopBase):
    """Loop that samples two turns, and three concurrent branches of the second."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async def say(episode: Episode) -> list[int]:
            async with episode:
                completion = await episode.generate(sampling_params)
            return completion.token_ids

        async with self.episode(row["raw_prompt"]) as episode:
            first = (await episode.generate(sampling_params)).token_ids
            await episode.observe(user("and then?"))
            branches = await run_together([say(episode.branch()) for _ in range(3)])
            last = (await episode.generate(sampling_params)).token_ids
        output = episode.output()
        return replace(output, extra_fields={"completions": [first, *branches, last]})


def make_manager(
    *,
    agent: str = "seeds_in_episodes",
    server_class: type[ScriptedServer] = SeededServer,
    num_servers: int = 2,
    streams: bool = False,
    num_workers: int = 1,
    script: Any = sample,
    seed: int = 0,
) -> AgentLoopManager:
    agent_config = AgentConfig(default_agent_loop=agent, num_workers=num_workers)
    return AgentLoopManager(
        RolloutConfig(agent=agent_config, n=2, seed=seed),
        servers=[server_class(script, name=f"s{n}", streams=streams) for n in range(num_servers)],
        template=hermes_template(),
        reward=RewardFunction(lambda output, row: 0.0, timeout_s=5),
    )


def completions(trajectories: Sequence[Trajectory]) -> list[Tokens]:
    return [t.output.extra_fields["completions"] for t in trajectories]


def run(manager: AgentLoopManager, **options: Any) -> list[Tokens]:
    return completions(run_virtual(manager.run(ROWS, **options)))


def test_two_runs_with_the_same_seed_sample_the_same_on_any_server_at_any_time() -> None:
    first = run(make_manager())
    again = run(make_manager(num_servers=3, num_workers=2))
    other = run(make_manager(seed=1))
    assert first == again
    assert not {tuple(c) for t in first for c in t} & {tuple(c) for t in other for c in t}


@pytest.mark.virtual_time
async def test_every_completion_of_a_run_has_its_own_seed() -> None:
    """Check rows, samples, turns, branches, equal contexts, steps, and evaluation during training."""
    manager = make_manager()
    found = [*await manager.run(ROWS, label="step=1"), *await manager.run(ROWS, label="step=2")]
    found += await manager.run([ROWS[0]] * 3, label="step=3")
    found += await manager.run(ROWS, label="step=1", validate=True)
    found += await manager.run(ROWS)
    found += await manager.run(ROWS)
    everything = [tuple(c) for t in completions(found) for c in t]
    assert len(set(everything)) == len(everything)


@pytest.mark.virtual_time
async def test_a_step_samples_the_same_regardless_of_earlier_runs() -> None:
    alone, after_others = make_manager(), make_manager()
    wanted = await alone.run(ROWS, label="step=7")
    await after_others.run(ROWS, label="step=6")
    await after_others.run(ROWS, label="step=7", validate=True)
    assert completions(await after_others.run(ROWS, label="step=7")) == completions(wanted)


def test_a_seed_set_by_the_user_is_used() -> None:
    @register("seeds_of_its_own")
    class OfItsOwn(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            async with self.episode(row["raw_prompt"]) as episode:
                await episode.generate({**sampling_params, "seed": 77})
            return episode.output()

    manager = make_manager(agent="seeds_of_its_own")
    run_virtual(manager.run(ROWS))
    server: Any
    for server in manager.server_manager.pool.servers:
        assert {request.sampling_params.seed for request in server.requests} == {77}


def test_a_completion_of_a_dead_server_is_continued_with_the_same_samples() -> None:
    async def scenario(*, dies: bool) -> list[Tokens]:
        manager = make_manager(streams=True)
        if dies:
            victim: Any = manager.server_manager.pool.servers[0]
            asyncio.get_running_loop().call_later(3.0, victim.die)
        trajectories = await manager.run(ROWS)
        assert manager.server_manager.pool.num_failovers > 0 or not dies
        return completions(trajectories)

    assert run_virtual(scenario(dies=True)) == run_virtual(scenario(dies=False))


@pytest.mark.parametrize("seconds", [5.0, 15.0, 25.0, 35.0])
def test_a_rollout_resumed_from_its_journal_samples_the_same_tokens(seconds: float, tmp_path: Path) -> None:
    """Check that a replayed completion is counted among the completions of equal contexts."""

    async def part(*, cancelled_after_s: float | None) -> list[Trajectory]:
        is_resumed = cancelled_after_s is None
        async with open_journal(tmp_path / "j", key=key_of(ROWS), rows=ROWS, resume=is_resumed) as journal:
            running = asyncio.ensure_future(make_manager().run(ROWS, journal=journal))
            await asyncio.wait([running], timeout=cancelled_after_s)
            if is_resumed:
                return running.result()
            running.cancel()
            await asyncio.wait([running])
            return []

    run_virtual(part(cancelled_after_s=seconds))
    resumed = run_virtual(part(cancelled_after_s=None))
    assert tokens_of(resumed) == tokens_of(run_virtual(make_manager().run(ROWS)))


def sample_slowly(request: ScriptedRequest) -> ScriptedReply:
    """Return one turn that the seed determines, or the rest of the turn, at one token per second."""
    params = request.sampling_params
    assert params.seed is not None
    words = " ".join(str(derived_seed(params.seed, place)) for place in range(3))
    tokens = encoded(f"{words}<|im_end|>")
    begun = request.prompt_ids.tolist()[len(request.prompt_ids) - params.num_sampled :]
    assert tokens[: len(begun)] == begun
    return ScriptedReply(tokens[len(begun) :], latency_s=float(len(tokens) - len(begun)))


@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_cancelled_rollout_resumes_with_the_same_samples(is_new_process: bool) -> None:
    def manager() -> AgentLoopManager:
        return make_manager(agent="partial_tool_agent", script=sample_slowly, streams=True)

    async def scenario() -> list[Trajectory]:
        first = manager()
        asyncio.get_running_loop().call_later(10.5, first.cancel_all)
        begun = await first.run(ROWS)
        assert {len(t.output.response_ids) for t in begun} == {10}
        return await (manager() if is_new_process else first).run(ROWS, earlier=begun)

    assert tokens_of(run_virtual(scenario())) == tokens_of(run_virtual(manager().run(ROWS)))


def test_tools_and_interactions_can_read_a_seed_of_their_trajectory() -> None:
    @register("seeds_of_the_trajectory")
    class OfTheTrajectory(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            async with self.episode(row["raw_prompt"]) as episode:
                await asyncio.sleep(random.uniform(0, 5))
                in_thread = await asyncio.to_thread(trajectory_seed, "mine")
                assert in_thread == trajectory_seed("mine") != trajectory_seed("others")
            return replace(episode.output(), extra_fields={"completions": [[in_thread]]})

    first = run(make_manager(agent="seeds_of_the_trajectory"))
    assert first == run(make_manager(agent="seeds_of_the_trajectory", num_workers=2))
    assert len({seed for [[seed]] in first}) == len(first)
    assert trajectory_seed("mine") is None


def test_derived_seeds_are_the_same_in_every_process_and_version() -> None:
    assert derived_seed(3, "step=1", 0) == 8492943318710683555
    assert derived_seed(3, "step=1", 0) != derived_seed(3, "step=10") != derived_seed(3, "step=1", 0, 0)
    seeds = CompletionSeeds(5)
    context = as_token_ids([1, 2, 3])
    numbered = [seeds.next(context), seeds.next(context), seeds.next(as_token_ids([1, 2]))]
    assert len(set(numbered)) == 3
    again = CompletionSeeds(5)
    assert again.next(as_token_ids([1, 2])) == numbered[2]
    assert [again.next(context), again.next(context)] == numbered[:2]
    assert all(0 <= seed < 2**63 for seed in numbered)


def tokens_of(trajectories: Sequence[Trajectory]) -> Tokens:
    return [t.output.response_ids.tolist() for t in trajectories]


def test_servers_with_costly_seeds_receive_no_seed() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        assert request.sampling_params.seed is None
        return ScriptedReply([100], stops=False)

    run(make_manager(server_class=PlainServer, script=script))
