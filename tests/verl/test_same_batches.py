"""Batches of this package and of verl's own worker for the same rows: every column is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from tests.helpers import call_text
from tests.verl.harness import (
    RewardWorker,
    ScriptedClient,
    assert_same,
    batch_of,
    run_ours,
    run_verls,
    verl_config,
)

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

FOLDER = Path(__file__).parent


def counting(text: str) -> str:
    """Call a tool as often as the prompt says, then answer."""
    num_calls = int(text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0])
    if text.count("<tool_response>") < num_calls:
        return f"let me see {call_text('count', step=1)}<|im_end|>"
    return "the count is done<|im_end|>"


def compare(config: Any, reply: Any, batch: Any, **options: Any) -> Any:
    ours = run_ours(config, ScriptedClient(reply), batch.select(deepcopy=True), **options)
    assert_same(ours, run_verls(config, ScriptedClient(reply), batch, **options))
    return ours


def test_single_turns_of_any_length_and_prompts_that_are_truncated(model: Path) -> None:
    prompts = ["a", "b " * 20, "c " * 300, "d " * 30]
    replies = {"a": "hello" * 400, "b": "hi<|im_end|>"}
    batch = batch_of(prompts, uid=["1", "2", "3", "4"], data_source=["x"] * 4)
    ours = compare(
        verl_config(model),
        lambda text: replies.get(text.split("user\n")[-1][:1], "the model<|im_end|>"),
        batch,
    )
    assert ours.batch["attention_mask"].sum(dim=1).tolist()[0] > 320


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_tool_yaml_with_state_in_agent_data(model: Path, side: str) -> None:
    config = verl_config(
        model,
        multi_turn__tool_config_path=str(FOLDER / "counter_tool.yaml"),
        multi_turn__max_tool_response_length=30,
        multi_turn__tool_response_truncate_side=side,
        agent__default_agent_loop="tool_agent",
    )
    batch = batch_of(
        ["0", "1", "2"],
        tools_kwargs=[
            {},
            {"count": {"create_kwargs": {"start": 5}}},
            {"count": {"create_kwargs": {"start": 100}}},
        ],
    )
    ours = compare(config, counting, batch)
    assert ours.non_tensor_batch["tool_rewards"].tolist() == [[], [0.5], [0.0, 0.0]]
    assert ours.non_tensor_batch["__num_turns__"].tolist() == [2, 4, 6]


def test_function_tools_and_the_selection_of_a_row(model: Path) -> None:
    config = verl_config(
        model,
        multi_turn__function_tool_path=str(FOLDER / "function_tools.py"),
        agent__default_agent_loop="tool_agent",
    )

    def reply(text: str) -> str:
        called = "<tool_response>" in text
        return "done<|im_end|>" if called else f"{call_text('shout', text='hello')}<|im_end|>"

    batch = batch_of(["a", "b"], extra_info=[{"tool_selection": ["shout"]}, {"tool_selection": []}])
    compare(config, reply, batch)


@pytest.mark.parametrize("agent_name", ["two_turns", "curious"])
def test_a_loop_of_a_user_runs_unchanged(model: Path, agent_name: str) -> None:
    import tests.verl.user_code  # noqa: F401  (registers the loop)

    config = verl_config(model, agent__agent_loop_config_path=str(FOLDER / "loops.yaml"))
    batch = batch_of(
        ["a", "b"], agent_name=[agent_name, "single_turn_agent"], data_source=["x", "y"], index=[0, 1]
    )
    ours = compare(config, lambda text: "hello<|im_end|>", batch)
    assert ours.non_tensor_batch["seen"].tolist() == ["x", None]


def test_scores_of_reward_workers(model: Path) -> None:
    batch = batch_of(
        ["a", "b"], data_source=["x"] * 2, reward_model=[{"ground_truth": "1"}] * 2, uid=["1", "2"]
    )
    config = verl_config(model)

    def reply(text: str) -> str:
        return "yes<|im_end|>" if "user\na" in text else "no, not at all<|im_end|>"

    workers = {"reward_loop_worker_handles": [RewardWorker(lambda text: float("yes" in text))]}
    ours = compare(config, reply, batch, **workers)
    assert ours.batch["rm_scores"].sum(dim=1).tolist() == [1, 0]
    assert ours.non_tensor_batch["acc"].tolist() == [True, False]
    assert ours.meta_info["reward_extra_keys"] == ["acc", "score"]


def test_validation_and_greedy_rows_have_verls_parameters(model: Path) -> None:
    config = verl_config(
        model, temperature=0.7, top_k=20, val_kwargs__temperature=0.3, val_kwargs__top_p=0.5, val_kwargs__n=1
    )
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "logprobs")
    for options in ({"validate": True}, {"__do_sample__": [True, False, True]}):
        seen = []
        for run in (run_ours, run_verls):
            client = ScriptedClient(lambda text: "hi<|im_end|>")
            run(config, client, batch_of(["a", "b", "c"], **options))
            seen.append(sorted(tuple(request[name] for name in names) for request in client.requests))
        assert seen[0] == seen[1]
        assert {type(value) for value in seen[0][0]} <= {float, int, bool}
