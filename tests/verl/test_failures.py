"""What this package does where verl's own worker loses the batch, and its own settings in verl's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from agent_loop.errors import ConfigError, RolloutError
from agent_loop.integrations.verl import VerlAgentLoopManager
from tests.helpers import call_text
from tests.verl.harness import RewardWorker, ScriptedClient, batch_of, run_ours, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

FOLDER = Path(__file__).parent


def test_a_row_that_breaks_has_no_gradient_and_the_mean_score_of_its_group(model: Path) -> None:
    import tests.verl.user_code  # noqa: F401

    config = verl_config(model, agent__default_agent_loop="two_turns")
    handles = [RewardWorker(lambda text: float(text.count("hello")))]
    batch = batch_of(["a", "break", "a", "a"], uid=["1", "1", "1", "2"])
    output = run_ours(
        config, ScriptedClient(lambda text: "hello<|im_end|>"), batch, reward_loop_worker_handles=handles
    )
    assert output.batch["response_mask"].sum(dim=1).tolist()[1] == 0
    assert output.batch["rm_scores"].sum(dim=1).tolist() == [2, 2, 2, 2]
    assert output.batch["attention_mask"][1, 400:].sum() == 1
    assert len(handles[0].requests) == 3


def test_a_batch_that_mostly_breaks_stops_the_run_with_the_error(model: Path) -> None:
    import tests.verl.user_code  # noqa: F401

    config = verl_config(model, agent__default_agent_loop="two_turns")
    with pytest.raises(RolloutError, match=r"2 of 3 trajectories failed(.|\n)*this row breaks"):
        run_ours(config, ScriptedClient(lambda text: "hi<|im_end|>"), batch_of(["break", "a", "break"]))


def test_an_interaction_yaml_of_an_earlier_verl_continues_the_conversation(model: Path) -> None:
    config = verl_config(model, agent__default_agent_loop="tool_agent")
    OmegaConf.update(
        config,
        "agent_loop_config.rollout.multi_turn.interaction_config_path",
        str(FOLDER / "interactions.yaml"),
        force_add=True,
    )

    def reply(text: str) -> str:
        return f"#### {1 + text.count('<|im_start|>assistant')}<|im_end|>"

    rows = batch_of(["one plus two?"], interaction_kwargs=[{"name": "gsm8k", "ground_truth": "3"}])
    output = run_ours(config, ScriptedClient(reply), rows)
    assert output.non_tensor_batch["turn_scores"].tolist() == [[0.0, 1.0]]
    assert output.non_tensor_batch["__num_turns__"].tolist() == [4]


def test_a_tool_that_hangs_ends_its_call_at_the_time_limit(model: Path) -> None:
    config = verl_config(
        model,
        multi_turn__function_tool_path=str(FOLDER / "hanging_tools.py"),
        agent__default_agent_loop="tool_agent",
    )
    OmegaConf.update(config, "agent_loop_config.rollout.multi_turn.tool_timeout_s", 0.2, force_add=True)

    def reply(text: str) -> str:
        called = "<tool_response>" in text
        return "done<|im_end|>" if called else f"{call_text('wait_for_ever')}<|im_end|>"

    output = run_ours(config, ScriptedClient(reply), batch_of(["a"]))
    assert output.non_tensor_batch["__num_turns__"].tolist() == [4]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "trainer.rundir",
            "runs/x",
            "agent_loop_config: unknown key 'trainer.rundir'; did you mean 'run_dir'",
        ),
        ("trainer.keep_trajectories", -1, "agent_loop_config: trainer.keep_trajectories is -1"),
    ],
)
def test_a_wrong_setting_is_named_before_an_actor_starts(
    key: str, value: Any, message: str, model: Path
) -> None:
    config = verl_config(model)
    OmegaConf.update(config, f"agent_loop_config.{key}", value, force_add=True)
    with pytest.raises(ConfigError, match=message):
        VerlAgentLoopManager.create(config, llm_client=None)
