"""Tests of `rollout_func` without training."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from agent_loop.errors import ConfigError, DataError
from agent_loop.integrations.trl import AgentLoopRollouts
from agent_loop.integrations.trl.completions import TRAJECTORY_KEY, rollout_output
from agent_loop.integrations.trl.worker import LoopThread, policy_weights
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from tests.helpers import text_reply, tool_call_reply, user
from tests.integrations.scripted import CONFIG, fake_trainer, rollouts_with, text_of


def roll_out(
    rollouts: AgentLoopRollouts,
    *rows: dict[str, Any],
    order: Sequence[int] | None = None,
    trainer: Any = None,
) -> dict[str, Any]:
    """Return the output for the prompts of a data set of rows, in the order of the rows or another one."""
    prompts = list(rollouts.dataset(rows or [{"prompt": "hi"}])["prompt"])
    chosen = prompts if order is None else [prompts[place] for place in order]
    return rollouts.rollout_func(chosen, trainer or fake_trainer())


def rewards_of(output: dict[str, Any]) -> list[float | None]:
    return AgentLoopRollouts.reward_func(agent_loop_trajectory=output[TRAJECTORY_KEY])


@pytest.mark.parametrize("order", [[0, 1, 0], [2, 2, 1, 1, 0, 0], [1, 1, 1, 0]])
def test_rows_come_back_in_the_order_of_the_prompts(order: list[int]) -> None:
    rollouts, _ = rollouts_with()
    with rollouts:
        output = roll_out(rollouts, *({"prompt": f"row {n}", "worth": n} for n in range(3)), order=order)
    assert rewards_of(output) == order
    assert all(len(column) == len(order) for column in output.values())


def test_a_column_of_dicts_with_different_keys_reaches_the_loop_unchanged() -> None:
    rollouts, _ = rollouts_with()
    rows = [{"prompt": "hi", "table": {"a": 1}}, {"prompt": "hi", "table": {"b": 2}}]
    with rollouts:
        output = roll_out(rollouts, *rows)
    assert [t.row["table"] for t in output[TRAJECTORY_KEY]] == [{"a": 1}, {"b": 2}]


def test_the_mask_marks_exactly_the_sampled_tokens() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return tool_call_reply("shelf_of", part=4) if request.turn == 0 else text_reply("there")

    rollouts, _ = rollouts_with(script)
    with rollouts:
        output = roll_out(rollouts, {"prompt": "where?"})
    ((ids,), (mask,), (logprobs,)) = (output[key] for key in ("completion_ids", "env_mask", "logprobs"))
    by_model = text_of([token for token, flag in zip(ids, mask, strict=True) if flag])
    by_others = text_of([token for token, flag in zip(ids, mask, strict=True) if not flag])
    assert "shelf_of" in by_model
    assert by_model.endswith("there<|im_end|>")
    assert "shelf 5" in by_others
    assert "there" not in by_others
    assert [value != 0 for value in logprobs] == [flag == 1 for flag in mask]


def test_failed_and_empty_trajectories_are_masked_and_failed_ones_have_no_reward() -> None:
    rollouts, _ = rollouts_with()
    rows = [
        {"prompt": "hi", "worth": 1},
        {"prompt": "hi", "is_broken": True},
        {"prompt": "far too long " * 500},
        {"prompt": "hi", "agent_name": "single_turn_agent", "worth": 1},
    ]
    with rollouts:
        output = roll_out(rollouts, *rows)
    assert rewards_of(output) == [1, None, 0, 1]
    assert [any(mask) for mask in output["env_mask"]] == [True, False, False, True]
    assert all(ids for ids in output["completion_ids"])
    assert [len(ids) for ids in output["completion_ids"]] == [len(mask) for mask in output["env_mask"]]


def test_weights_are_published_once_per_step_and_for_each_trainer() -> None:
    rollouts, server = rollouts_with()
    versions: list[int] = []
    update = server.update_weights

    async def update_weights(weights: Any, *, weight_version: int) -> None:
        versions.append(weight_version)
        await update(weights, weight_version=weight_version)

    server.update_weights = update_weights
    with rollouts:
        trainer = fake_trainer(step=0)
        roll_out(rollouts, trainer=trainer)
        roll_out(rollouts, trainer=trainer)
        trainer.state.global_step = 3
        output = roll_out(rollouts, trainer=trainer)
        roll_out(rollouts, trainer=fake_trainer(step=3))
    assert versions == [0, 3, 3]
    (trajectory,) = output[TRAJECTORY_KEY]
    assert set(trajectory.output.weight_versions.tolist()) == {3}


def test_an_evaluation_uses_the_validation_sampling_parameters() -> None:
    val = CONFIG.rollout.val.model_copy(update={"temperature": 0.5})
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"val": val})})
    rollouts, server = rollouts_with(config=config)
    with rollouts:
        roll_out(rollouts)
        roll_out(rollouts, trainer=fake_trainer(is_training=False))
    assert [request.sampling_params.temperature for request in server.requests] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": [print]}, "remove them and name"),
        ({"environment_factories": {}}, "remove them and name"),
        ({"args": {"use_vllm": True}}, "use_vllm is True"),
        ({"args": {"temperature": 0.7}}, "make them equal"),
        ({"args": {"max_completion_length": 64}}, "below rollout.response_length 96"),
        ({"accelerator": SimpleNamespace(num_processes=4, unwrap_model=None)}, "runs in 4 processes"),
    ],
)
def test_arguments_that_contradict_the_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    rollouts, server = rollouts_with()
    with rollouts, pytest.raises(ConfigError, match=message):
        roll_out(rollouts, trainer=fake_trainer(**changes))
    assert not server.requests


@pytest.mark.parametrize("prompt", ["hi", [], user("hi"), [{**user("hi")[0], "agent_loop_row": 7}]])
def test_prompts_of_another_data_set_are_rejected(prompt: Any) -> None:
    rollouts, _ = rollouts_with()
    with rollouts, pytest.raises(DataError, match=r"rollouts\.dataset"):
        rollouts.dataset([{"prompt": "hi"}])
        rollouts.rollout_func([prompt], fake_trainer())


def test_an_adapter_that_cannot_be_merged_is_rejected() -> None:
    rollouts, _ = rollouts_with()
    trainer = fake_trainer()
    trainer.model = peft.get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"], use_dora=True)
    )
    with rollouts, pytest.raises(ConfigError, match="use_dora"):
        roll_out(rollouts, trainer=trainer)


def test_adapters_are_published_merged_under_the_names_of_the_model() -> None:
    base = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    names = [name for name, _ in base.named_parameters()]
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    inputs = torch.randn(4, 3)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    weights = dict(policy_weights(model))
    assert sorted(weights) == sorted(names)
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain(inputs), model(inputs))


def test_closing_the_rollouts_ends_the_server_and_the_thread() -> None:
    rollouts, server = rollouts_with()
    with rollouts:
        roll_out(rollouts)
    assert not [thread for thread in threading.enumerate() if thread.name == "agent-loop-trl"]
    assert server.num_running == 0
    assert server.num_sessions == 0


def test_results_and_errors_of_a_coroutine_in_the_other_thread_are_passed_on() -> None:
    async def gives() -> int:
        return 7

    async def fails() -> None:
        raise TimeoutError("its own")

    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    thread = LoopThread("other")
    assert thread.run(gives()) == 7
    with pytest.raises(TimeoutError, match="its own"):
        thread.run(fails())
    with pytest.raises(CancelledError):
        thread.run(is_cancelled())
    thread.close()
    too_late = gives()
    with pytest.raises(RuntimeError, match="closed"):
        thread.run(too_late)
    too_late.close()


def test_ctrl_c_cancels_the_rollout_and_is_raised() -> None:
    asked = threading.Event()

    def script(request: ScriptedRequest) -> ScriptedReply:
        asked.set()
        return text_reply("never", latency_s=math.inf)

    def interrupt() -> None:
        asked.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    rollouts, server = rollouts_with(script)
    with rollouts:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            roll_out(rollouts)
        assert server.num_running == 0
        assert server.num_sessions == 0


def test_tokens_beyond_the_trainers_limit_are_cut_off() -> None:
    output = AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        response_mask=[1, 0, 1],
        response_logprobs=[-1.0, 0.0, -2.0],
    )
    found = rollout_output([Trajectory(output, {}, 0, 0, 1.0, {})], max_tokens=2, pad_token_id=0)
    assert found["completion_ids"] == [[3, 4]]
    assert found["env_mask"] == [[1, 0]]
    assert found["logprobs"] == [[-1.0, 0.0]]
