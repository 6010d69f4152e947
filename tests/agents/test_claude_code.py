"""Claude Code: failing tools, calls that it rewrites, sub-agents, requests that cannot be honoured, and a container."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import IncidentKind
from tests.agents.programs import AGENTS, COMMAND, policy, programs_folder
from tests.agents.test_programs import CHECK, AgentHarness
from tests.helpers import call_text, small_tokenizer, text_reply
from tests.serve.harness import origins
from tests.workspaces.test_containers import BASE, own_containers

pytestmark = [
    pytest.mark.agents,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("on_path", "workspaces_root"),
]

AGENT = AGENTS["claude-code"]
SUBTASK = "Count the files and report the number."
FINISHED = "Everything is done."


def bash(command: str, **arguments: Any) -> str:
    return call_text("Bash", command=command, description="-", **arguments)


def steps_in(folder: str) -> list[str]:
    """Return completions that use the tools of Claude Code, several of them wrongly or in a form that it rewrites."""
    return [
        bash("cat no-such-file; exit 3"),
        f"Two at once.{bash('echo a > a.txt')}\n{bash('echo b > b.txt')}",
        bash(f"cd {folder} && ls"),
        call_text("Write", file_path=f"{folder}/w.py", content="x = 1   \ny = 2  \n\n"),
        call_text("Edit", file_path=f"{folder}/w.py", old_string="x = 1", new_string="x = 3   "),
        call_text("Edit", file_path=f"{folder}/w.py", old_string="not there", new_string="-"),
        call_text("Read", file_path=f"{folder}/w.py", limit="5"),
        call_text("NoSuchTool", x=1),
        call_text("Bash", wrong="x"),
        call_text("WebSearch", query="foxes"),
        call_text("Agent", description="sub", prompt=SUBTASK, subagent_type="general-purpose"),
        "<think>\nThat was all.\n</think>\n\n" + FINISHED,
    ]


def reply(request: ScriptedRequest) -> ScriptedReply:
    """Return the next step of the conversation, or one for the sub-agent."""
    text = small_tokenizer().decode(request.prompt_ids.tolist())
    _, _, conversation = text.partition("</tools>")
    if not conversation:
        return text_reply("A short text.")
    first, *turns = conversation.split("<|im_start|>assistant")
    if SUBTASK in first:
        return text_reply("There are 2." if len(turns) > 1 else bash("ls | wc -l > count.txt"))
    [folder, *_] = re.findall(r"working directory: (\S+)", text)
    steps = steps_in(folder)
    # The end of the sub-agent is told in a further turn.
    return text_reply(steps[min(len(turns), len(steps)) - 1])


def test_a_long_task_is_one_trajectory_and_its_sub_agent_another() -> None:
    harness = AgentHarness(reply, max_assistant_turns=50)
    check = {"command": ["sh", "-c", "grep -qx 'x = 3' w.py && test -f a.txt -a -f b.txt -a -f count.txt"]}
    trajectories = harness.run_agent(AGENT, workspace={"check": check})
    harness.assert_solved(trajectories)
    main, sub_agent = (t.output for t in trajectories)
    num_steps = len(steps_in("-"))
    expected = ["prompt", *["model", "tool"] * (num_steps - 1), "model"]
    assert origins(main)[: len(expected)] == expected
    assert main.extra_fields["agent_answer"] == FINISHED
    assert origins(sub_agent) == ["prompt", "model", "tool", "model"]
    kinds = {incident.kind for incident in main.incidents}
    assert kinds <= {
        IncidentKind.REWRITTEN_CALL,
        IncidentKind.SYSTEM_MESSAGE_AS_USER,
        IncidentKind.FAILED_REQUEST,  # the search of Anthropic's servers
    }
    assert IncidentKind.REWRITTEN_CALL in kinds
    results = [str(message["content"]) for message in main.messages if message["role"] == "tool"]
    assert results[0].startswith("Error: ")
    assert sum(result.startswith("Error: ") for result in results) >= 4


# -- a container, which reaches nothing but the gateway ----------------------------------------------------------------

needs_podman = pytest.mark.skipif(
    shutil.which("podman") is None, reason="needs podman: tests/workspaces/install_containers.sh"
)


@needs_podman
def test_an_agent_in_a_container_works_there_and_leaves_no_container() -> None:
    installed = (programs_folder() / "claude").resolve().parent
    container = {
        "image": BASE,
        "mounts": [f"{installed}:/opt/claude:ro"],
        "env": {"PATH": "/opt/claude:/usr/bin:/bin"},
    }
    seen = "test -e /.dockerenv -o -e /run/.containerenv && ! ls " + str(Path(__file__).parent)
    harness = AgentHarness(policy(AGENT, seen, COMMAND))
    harness.assert_solved(harness.run_agent(AGENT, workspace={"container": container, "check": CHECK}))
    assert own_containers() == []


@needs_podman
def test_an_agent_that_its_container_lacks_fails_with_the_command_that_installs_it() -> None:
    [trajectory] = AgentHarness(policy(AGENT)).run_agent(AGENT, workspace={"container": {"image": BASE}})
    assert trajectory.reward is None
    assert "npm install -g @anthropic-ai/claude-code" in trajectory.output.failure.error
