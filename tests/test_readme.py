"""Tests that run the README's code unchanged."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import load_config
from agent_loop.rewards.function import RewardFunction
from agent_loop.testing import run_virtual
from agent_loop.tools.registry import load_tools
from agent_loop.types import StopReason
from tests.helpers import encoded, small_tokenizer, text_reply, tool_call_reply
from tests.rollout.harness import WorkerHarness

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    """Run the README's Python blocks in order and return the names that they define."""
    names: dict[str, Any] = {"__name__": "readme"}
    for block in code_blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_tool_and_the_reward_of_the_readme(readme: dict[str, Any]) -> None:
    reward = RewardFunction(readme["reward"], timeout_s=5)
    harness = WorkerHarness(
        [tool_call_reply("multiply", a=12, b=34), text_reply("It is 408.")],
        tools=[readme["multiply"]],
        reward=reward,
    )
    trajectory = harness.run_one(answer="408")
    assert [m["content"] for m in trajectory.output.messages if m["role"] == "tool"] == ["408"]
    assert trajectory.reward == 1.0


def test_the_custom_loop_of_the_readme(readme: dict[str, Any]) -> None:
    harness = WorkerHarness([text_reply("It is 7."), text_reply("It is 8.")], agent="reflect_once")
    output = harness.run_one().output
    assert output.stop_reason is StopReason.ANSWERED
    assert output.answer == "It is 8."
    assert output.num_turns == 4


def test_the_custom_loop_ends_at_a_limit(readme: dict[str, Any]) -> None:
    output = WorkerHarness([text_reply("It is 7.")], agent="reflect_once", response_length=8).run_one().output
    assert output.stop_reason is StopReason.RESPONSE_LENGTH


def test_the_loop_on_token_ids(readme: dict[str, Any]) -> None:
    output = WorkerHarness([text_reply("It is 7.")], agent="bare_tokens").run_one().output
    assert output.response_ids.tolist() == encoded("It is 7.<|im_end|>")
    assert output.response_mask.all()


def test_the_loop_on_token_ids_can_be_rewarded_and_respects_the_limits(
    readme: dict[str, Any],
) -> None:
    reward = RewardFunction(readme["reward"], timeout_s=5)
    harness = WorkerHarness([text_reply("It is 408.")], agent="bare_tokens", reward=reward)
    assert harness.run_one(answer="408").reward == 1.0
    harness = WorkerHarness(
        [text_reply("It is 408. " * 40)], agent="bare_tokens", reward=reward, response_length=32
    )
    trajectory = harness.run_one(answer="408")
    assert len(trajectory.output.response_ids) == 32
    assert trajectory.output.stop_reason is StopReason.RESPONSE_LENGTH
    assert trajectory.reward == 1.0


def test_the_rollout_layer_runs_with_the_readme_s_configuration(
    readme: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "task.py").write_text(code_blocks("python")[0], encoding="utf-8")
    (tmp_path / "script.py").write_text(
        "from tests.helpers import text_reply, tool_call_reply\n"
        "def script(request):\n"
        "    return tool_call_reply('multiply', a=12, b=34) if request.turn == 0 else text_reply('It is 408.')\n",
        encoding="utf-8",
    )
    (tmp_path / "config.yaml").write_text(code_blocks("yaml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    engine = ["rollout.engine=scripted", "rollout.engine_kwargs.script=script.py:script", "model.path=model"]
    config = load_config("config.yaml", overrides=engine)
    assert list(load_tools(config.rollout.multi_turn.tools)) == ["multiply"]
    row = json.loads(re.findall(r'\{"prompt".*\}', README)[0])
    rows = [{**row, "raw_prompt": [{"role": "user", "content": row["prompt"]}]}] * 3
    responses, mask, logprobs, rewards = run_virtual(readme["roll_out"](config, rows))
    assert responses.shape == mask.shape == logprobs.shape
    assert rewards.tolist() == [1.0] * (3 * 8)
