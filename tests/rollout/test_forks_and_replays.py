"""Trajectories that continue from their middle or are replayed: which states, what is replayed, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from msgspec import structs

from agent_loop.config import Config, RolloutConfig, load_config
from agent_loop.config.training import ForkConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.recording.recorded_responses import extract_responses, first_difference
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.forks import FORKED_TURN, Fork, as_branches, chosen_states, find_forks, refuse_forks
from agent_loop.rollout.jobs import Job, JobFactory
from agent_loop.rollout.journal import StepKey, open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.replay import replay_trajectory
from agent_loop.runtime.concurrency import run_while
from agent_loop.runtime.instances import OnReplay
from agent_loop.seeds import trajectory_seed
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.token_chunks import FORCED
from agent_loop.training.rollouts import fork_metrics
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind, Segment, Trajectory
from agent_loop.types import Origin, StopReason, as_token_ids
from tests.helpers import (
    call_text,
    encoded,
    hermes_template,
    small_tokenizer,
    text_reply,
    tool_call_reply,
    user,
)
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
def test_states_are_chosen_before_unsure_turns_or_evenly(settings: dict[str, Any], states: list[int]) -> None:
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


@pytest.mark.parametrize("on_replay", [OnReplay.RESTART, OnReplay.ONCE])
def test_a_tool_or_interaction_whose_state_cannot_be_restored_is_refused_by_name(on_replay: OnReplay) -> None:
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
        is_answered = encoded("<tool_response>")[0] in request.prompt_ids
        return text_reply("done") if is_answered else tool_call_reply("multiply", a=1, b=2)

    settings = {
        "prompt_length": 800,
        "response_length": 200,
        "agent": {"default_agent_loop": "tool_agent"},
        "multi_turn": {"tools": ["examples.chain.task:multiply"], "format": "hermes"},
    }
    servers, config = [ScriptedServer(script)], RolloutConfig.model_validate(settings)
    async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
        manager.check_forks()
        mains = await manager.run([{"raw_prompt": user("1 + 1?")}], n=2, label="step=1")
        forks = forks_of([structs.replace(main, reward=1.0) for main in mains])
        seen: list[Trajectory] = []
        found = await manager.run_forks(forks, n=3, label="step=1/forks", on_trajectory=seen.append)
    assert len(seen) == 6
    assert [(t.group, t.rollout) for t in found] == [(g, r) for g in range(2) for r in range(3)]
    assert len(as_branches(forks, [structs.replace(t, reward=0.0) for t in found])) == 6


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
def test_a_live_continuation_fails_at_a_call_that_cannot_be_replayed(config: Config, script: str) -> None:
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
def test_incomplete_records_are_refused(config: Config, changes: dict[str, object], message: str) -> None:
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
