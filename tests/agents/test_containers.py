"""An agent that runs inside a container and reaches nothing but the gateway."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agent_loop.types import StopReason
from tests.agents.programs import AGENTS, COMMAND, policy, programs_folder
from tests.agents.test_programs import CHECK, AgentHarness
from tests.workspaces.test_containers import BASE, own_containers

pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("on_path", "workspaces_root"),
    pytest.mark.skipif(
        shutil.which("podman") is None, reason="needs podman: tests/workspaces/install_containers.sh"
    ),
]


def test_an_agent_in_a_container_works_there_and_leaves_no_container() -> None:
    agent = AGENTS["claude-code"]
    installed = (programs_folder() / "claude").resolve().parent
    container = {
        "image": BASE,
        "mounts": [f"{installed}:/opt/claude:ro"],
        "env": {"PATH": "/opt/claude:/usr/bin:/bin"},
    }
    seen = "test -e /.dockerenv -o -e /run/.containerenv && ! ls " + str(Path(__file__).parent)
    harness = AgentHarness(policy(agent, seen, COMMAND))
    trajectories = harness.run_agent(agent, workspace={"container": container, "check": CHECK})
    assert [t.output.failure for t in trajectories] == [None] * len(trajectories)
    assert {t.output.stop_reason for t in trajectories} == {StopReason.ANSWERED}
    assert {t.reward for t in trajectories} == {1.0}
    harness.assert_every_sampled_token_is_trained_on_once(trajectories)
    assert own_containers() == []


def test_an_agent_that_its_container_lacks_fails_with_the_command_that_installs_it() -> None:
    agent = AGENTS["claude-code"]
    [trajectory] = AgentHarness(policy(agent)).run_agent(agent, workspace={"container": {"image": BASE}})
    assert trajectory.reward is None
    assert "npm install -g @anthropic-ai/claude-code" in trajectory.output.failure.error
