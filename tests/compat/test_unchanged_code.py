"""Code of a user of verl with the imports of this package. `tests/verl` runs the same files in verl."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_loop.config import MultiTurnConfig, RolloutConfig
from agent_loop.config.rollout import AgentConfig
from agent_loop.errors import ConfigError
from agent_loop.loading import load_module
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.helpers import hermes_template, text_reply, tool_call_reply

ROOT = Path(__file__).parents[2]


def run(folder: Path, row: Row, answers: list[ScriptedReply]) -> Trajectory:
    config = RolloutConfig(
        prompt_length=512,
        response_length=512,
        agent=AgentConfig(agent_loop_config_path=str(folder / "loops.yaml")),
        multi_turn=MultiTurnConfig(tool_config_path=str(folder / "counter_tool.yaml")),
    )

    def script(request: ScriptedRequest) -> ScriptedReply:
        return answers[request.turn]

    async def main() -> Trajectory:
        template = hermes_template()
        async with AgentLoopManager(config, servers=[ScriptedServer(script)], template=template) as manager:
            [trajectory] = await manager.run([{"raw_prompt": [{"role": "user", "content": "Count."}], **row}])
            return trajectory

    return run_virtual(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the code with the imports of this package."""
    tmp_path = tmp_path_factory.mktemp("code")
    for name in ("user_code.py", "loops.yaml", "counter_tool.yaml"):
        shutil.copy(ROOT / "tests" / "verl" / name, tmp_path)
    for file in tmp_path.glob("*.yaml"):
        text = file.read_text().replace("tests.verl.user_code.", f"{tmp_path / 'user_code.py'}:")
        file.write_text(text)
    page = (ROOT / "docs" / "from-verl.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^sed .*$", page, re.MULTILINE)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_loop_and_its_registry_file(folder: Path) -> None:
    output = run(folder, {"agent_name": "curious"}, [text_reply("one"), text_reply("two")]).output
    assert output.failure is None
    template, mask = hermes_template(), output.response_mask.astype(bool)
    assert template.decode(output.response_ids) == "one<|im_end|>why?two<|im_end|>"
    assert template.decode(output.response_ids[mask]) == "one<|im_end|>two<|im_end|>"


def test_a_tool_and_its_registry_file(folder: Path) -> None:
    answers = [tool_call_reply("count", step=3), tool_call_reply("count", step=4), text_reply("done")]
    kwargs = {"count": {"create_kwargs": {"start": 10}}}
    output = run(folder, {"agent_name": "tool_agent", "tools_kwargs": kwargs}, answers).output
    assert output.failure is None
    replies = [str(m["content"]) for m in output.messages if m["role"] == "tool"]
    assert [reply.partition(" after")[0] for reply in replies] == ["count 13", "count 17"]


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_an_import_of_verl_is_refused_with_the_module_to_import_from(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from verl.tools.base_tool import BaseTool\n")
    with pytest.raises(ConfigError, match="import verl's names from"):
        load_module(str(tmp_path / "mine.py"), key="reward.function")
