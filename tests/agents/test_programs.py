"""Coding agents as they are published, each against the gateway over a real socket with a scripted policy."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.runtime.owner import OWNER_VARIABLE
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import Origin, StopReason
from tests.agents.programs import AGENTS, COMMAND, TASK, TITLE, Agent, policy
from tests.helpers import hermes_template, user
from tests.listeners import listening_addresses, process_tree
from tests.serve.harness import ProgramHarness, origins

pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("on_path", "workspaces_root"),
]

LIMITS = {"prompt_length": 400_000, "response_length": 100_000, "deadline_s": 200.0}
CHECK = {"command": ["grep", "-qx", "hello", "greeting.txt"]}

every_agent = pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)


class AgentHarness(ProgramHarness):
    """Worker that runs agents, and keeps every reply of the scripted policy."""

    def __init__(self, script: Any, **options: Any) -> None:
        self.replies: list[ScriptedReply] = []

        def recorded(request: ScriptedRequest) -> ScriptedReply:
            reply = script(request)
            self.replies.append(reply)
            return reply

        super().__init__(recorded, **{**LIMITS, **options})

    def run_agent(self, agent: Agent, **columns: Any) -> list[Trajectory]:
        """Run one agent, and check that its tokens are on record and that nothing of it is left."""
        row = {"agent_name": agent.loop, "raw_prompt": user(TASK), "workspace": {"check": CHECK}, **columns}
        trajectories = asyncio.run(self.run(None, **row))
        assert_nothing_is_running()
        return trajectories

    def assert_solved(self, trajectories: list[Trajectory]) -> None:
        """Check that the task is solved, and that every sampled token is trained on once."""
        assert [t.output.failure for t in trajectories] == [None] * len(trajectories)
        assert {t.output.stop_reason for t in trajectories} == {StopReason.ANSWERED}
        assert {t.reward for t in trajectories} == {1.0}
        self.assert_every_sampled_token_is_trained_on_once(trajectories)

    def assert_every_sampled_token_is_trained_on_once(self, trajectories: list[Trajectory]) -> None:
        sampled = sorted(tuple(reply.token_ids) for reply in self.replies)
        segments = [s for t in trajectories for s in t.output.segments if s.origin is Origin.MODEL]
        assert sorted(tuple(s.token_ids.tolist()) for s in segments) == sampled
        masked_in = sum(int(t.output.response_mask.sum()) for t in trajectories)
        assert masked_in == sum(map(len, sampled))


def assert_nothing_is_running() -> None:
    """Check that no process, port or folder of an agent is left."""
    assert process_tree(os.getpid()) == [os.getpid()]
    assert listening_addresses([os.getpid()]) == []
    assert processes_with(is_own) == []
    assert list(Path(os.environ["TMPDIR"]).glob("agent-loop-workspaces-*/*")) == []


def processes_with(matches: Callable[[bytes], bool]) -> list[str]:
    """Return the processes of which an environment variable matches."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(map(matches, variables)):
            found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found


def is_own(variable: bytes) -> bool:
    """Return whether a variable marks a workspace of this process, also in processes that left its tree."""
    return variable.startswith(f"{OWNER_VARIABLE}=al".encode()) and f".{os.getpid()}.".encode() in variable


@every_agent
def test_an_agent_changes_a_file_with_its_own_shell_and_every_token_is_on_record(agent: Agent) -> None:
    harness = AgentHarness(policy(agent, COMMAND))
    trajectories = harness.run_agent(agent)
    harness.assert_solved(trajectories)
    task = trajectories[-1].output
    assert origins(task) == ["prompt", "model", "tool", "model"]
    assert TASK in hermes_template().decode(task.prompt_ids)
    assert task.extra_fields["agent_answer"] == agent.answer
    incidents = {incident.kind for t in trajectories for incident in t.output.incidents}
    assert incidents <= {
        IncidentKind.SYSTEM_MESSAGE_AS_USER
    }  # the template of the tests has no place for them


def test_the_title_that_opencode_asks_for_is_a_conversation_of_its_own() -> None:
    agent = AGENTS["opencode"]
    harness = AgentHarness(policy(agent, COMMAND))
    trajectories = harness.run_agent(agent)
    assert len(trajectories) == 2
    [title] = [t.output for t in trajectories if origins(t.output) == ["prompt", "model"]]
    assert hermes_template().decode(title.response_ids) == f"{TITLE}<|im_end|>"
    assert title.tool_schemas == ()


@every_agent
def test_an_agent_whose_work_fails_the_check_scores_zero(agent: Agent) -> None:
    trajectories = AgentHarness(policy(agent, "echo wrong > greeting.txt")).run_agent(agent)
    assert {t.reward for t in trajectories} == {0.0}
    assert {t.output.stop_reason for t in trajectories} == {StopReason.ANSWERED}


@every_agent
def test_an_agent_whose_turns_are_used_up_ends_at_this_limit_and_its_work_is_checked(agent: Agent) -> None:
    harness = AgentHarness(policy(agent, COMMAND, "echo more"), max_assistant_turns=1)
    trajectories = harness.run_agent(agent)
    assert trajectories[-1].output.stop_reason is StopReason.MAX_ASSISTANT_TURNS
    assert trajectories[-1].reward == 1.0
    assert trajectories[-1].output.failure is None


def test_an_agent_is_killed_at_the_deadline_and_its_work_is_checked() -> None:
    agent = AGENTS["claude-code"]
    slow = f"{COMMAND}; sleep 1000"
    trajectories = AgentHarness(policy(agent, slow), deadline_s=30.0).run_agent(agent)
    assert {t.output.stop_reason for t in trajectories} == {StopReason.DEADLINE}
    assert {t.reward for t in trajectories} == {1.0}


def wait_for_file() -> None:
    while not list(Path(os.environ["TMPDIR"]).glob("agent-loop-workspaces-*/*/workspace/greeting.txt")):
        time.sleep(0.1)


@every_agent
def test_an_agent_that_is_cancelled_during_a_command_leaves_nothing_behind(agent: Agent) -> None:
    harness = AgentHarness(policy(agent, f"{COMMAND}; sleep 1000"))

    async def cancel_when_the_command_runs() -> None:
        await run_in_thread(wait_for_file)
        harness.worker.cancel_all()

    async def scenario() -> list[Trajectory]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cancel_when_the_command_runs())
            return await harness.run(None, agent_name=agent.loop, raw_prompt=user(TASK))

    trajectories = asyncio.run(scenario())
    assert StopReason.CANCELLED in {t.output.stop_reason for t in trajectories}
    assert {t.output.failure for t in trajectories} == {None}
    assert_nothing_is_running()


def test_the_environment_of_an_agent_holds_no_secret_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "shh")
    agent = AGENTS["mini-swe-agent"]
    check = {"command": ["sh", "-c", "grep -q OPENAI_API_KEY found && ! grep -q SECRET found"]}
    [trajectory] = AgentHarness(policy(agent, "env > found")).run_agent(agent, workspace={"check": check})
    assert trajectory.reward == 1.0
