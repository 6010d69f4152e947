"""Code of a user of verl with its imports of verl, which is not installed. `tests/verl` runs the same files in verl."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent_loop.config import MultiTurnConfig, RolloutConfig
from agent_loop.config.rollout import AgentConfig
from agent_loop.errors import ConfigError
from agent_loop.integrations.verl import import_names
from agent_loop.loading import load_module
from agent_loop.loops import registry
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.helpers import hermes_template, text_reply, tool_call_reply

FOLDER = Path("tests/verl")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    """Remove verl's names again, and the code that got them."""
    yield
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != import_names.__name__]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules.pop("tests.verl.user_code", None)


def run(rows: Sequence[Row], answers: Sequence[ScriptedReply]) -> list[Trajectory]:
    config = RolloutConfig(
        prompt_length=512,
        response_length=512,
        agent=AgentConfig(agent_loop_config_path=str(FOLDER / "loops.yaml")),
        multi_turn=MultiTurnConfig(tool_config_path=str(FOLDER / "counter_tool.yaml")),
    )

    def script(request: ScriptedRequest) -> ScriptedReply:
        return answers[request.turn]

    async def main() -> list[Trajectory]:
        template = hermes_template()
        async with AgentLoopManager(config, servers=[ScriptedServer(script)], template=template) as manager:
            return await manager.run(rows)

    return run_virtual(main())


def row(**columns: object) -> Row:
    return {"raw_prompt": [{"role": "user", "content": "Count."}], **columns}


def test_a_loop_and_its_registry_file() -> None:
    answers = [text_reply("one"), text_reply("two")]
    [trajectory] = run([row(agent_name="curious")], answers)
    template, output = hermes_template(), trajectory.output
    assert output.failure is None
    assert output.prompt_ids.tolist() == template.open(row()["raw_prompt"]).tolist()
    assert template.decode(output.response_ids) == "one<|im_end|>why?two<|im_end|>"
    mask = output.response_mask.astype(bool)
    assert template.decode(output.response_ids[mask]) == "one<|im_end|>two<|im_end|>"


def test_a_tool_and_its_registry_file() -> None:
    answers = [
        tool_call_reply("count", step=3),
        tool_call_reply("count", step=4),
        text_reply("done"),
    ]
    kwargs = {"count": {"create_kwargs": {"start": 10}}}
    [trajectory] = run([row(agent_name="tool_agent", tools_kwargs=kwargs)], answers)
    assert trajectory.output.failure is None
    replies = [m["content"] for m in trajectory.output.messages if m["role"] == "tool"]
    assert [reply.partition(" after")[0] for reply in replies] == ["count 13", "count 17"]


def test_a_module_without_a_counterpart_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from verl.utils.torch_functional import logprobs_from_logits\n")
    with pytest.raises(ConfigError, match=r"verl\.utils\.torch_functional has no counterpart in agent_loop"):
        load_module(str(tmp_path / "mine.py"), key="reward.function")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("from verl.tools.schemas import Nothing", "cannot import name 'Nothing'"),
        ("from verl import DataProto", "DataProto has no counterpart in agent_loop: AgentLoopManager"),
    ],
)
def test_a_name_without_a_counterpart_is_named(line: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=error):
        load_module(str(tmp_path / "mine.py"), key="reward.function")


def test_modules_and_names_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import verl.utils.rollout_trace as trace\n"
        "from verl.experimental import agent_loop\n"
        "from verl.experimental.agent_loop import AgentLoopBase, register\n"
        "from verl.utils.profiler import simple_timer\n"
    )
    mine = load_module(str(tmp_path / "mine.py"), key="reward.function")
    assert mine.agent_loop.AgentLoopBase is mine.AgentLoopBase
    assert callable(mine.trace.rollout_trace_op)
    assert mine.register is registry.register
