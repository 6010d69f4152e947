"""Batches of this package and of verl's own worker: the same columns, tokens and completions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopWorker
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
)
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.rollout.replica import TokenOutput

import tests.verl.user_code  # noqa: F401  (registers a loop)
from agent_loop.chat.template import ChatTemplate
from agent_loop.integrations.verl.loops import ContinuousTokens
from agent_loop.integrations.verl.manager.worker import VerlRolloutWorker
from agent_loop.servers.embedded.server import EmbeddedServer
from tests.helpers import call_text, encoded, small_tokenizer
from tests.verl.harness import (
    ScriptedClient,
    assert_same,
    batch_of,
    calling,
    completion,
    run_ours,
    run_verls,
    scored,
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
    ours = run_ours(config, reply, batch.select(deepcopy=True), **options)
    assert_same(ours, run_verls(config, reply, batch, **options))
    return ours


def test_single_turns_of_any_length_and_prompts_that_are_truncated(model: Path) -> None:
    prompts = ["a", "b " * 20, "c " * 300, "d " * 30]
    replies = {"a": "hello" * 400, "b": "hi<|im_end|>"}
    batch = batch_of(prompts, uid=["1", "2", "3", "4"], data_source=["x"] * 4)

    def reply(text: str) -> str:
        return replies.get(text.split("user\n")[-1][:1], "the model<|im_end|>")

    ours = compare(verl_config(model), reply, batch)
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
    starts = [{"count": {"create_kwargs": {"start": start}}} for start in (5, 100)]
    ours = compare(config, counting, batch_of(["0", "1", "2"], tools_kwargs=[{}, *starts]))
    assert ours.non_tensor_batch["tool_rewards"].tolist() == [[], [0.5], [0.0, 0.0]]
    assert ours.non_tensor_batch["__num_turns__"].tolist() == [2, 4, 6]


def test_function_tools_and_the_selection_of_a_row(model: Path) -> None:
    config = verl_config(
        model,
        multi_turn__function_tool_path=str(FOLDER / "function_tools.py"),
        agent__default_agent_loop="tool_agent",
    )
    batch = batch_of(["a", "b"], extra_info=[{"tool_selection": ["shout"]}, {"tool_selection": []}])
    compare(config, calling("shout", text="hello"), batch)


@pytest.mark.parametrize("agent_name", ["two_turns", "curious"])
def test_a_loop_of_a_user_runs_unchanged(model: Path, agent_name: str) -> None:
    config = verl_config(model, agent__agent_loop_config_path=str(FOLDER / "loops.yaml"))
    batch = batch_of(
        ["a", "b"], agent_name=[agent_name, "single_turn_agent"], data_source=["x", "y"], index=[0, 1]
    )
    ours = compare(config, lambda text: "hello<|im_end|>", batch)
    assert ours.non_tensor_batch["seen"].tolist() == ["x", None]


def test_scores_of_reward_workers(model: Path) -> None:
    truths = [{"ground_truth": "1"}] * 2
    batch = batch_of(["a", "b"], data_source=["x"] * 2, reward_model=truths, uid=["1", "2"])

    def reply(text: str) -> str:
        return "yes<|im_end|>" if "user\na" in text else "no, not at all<|im_end|>"

    ours = compare(verl_config(model), reply, batch, **scored(lambda text: float("yes" in text)))
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


USER = {"role": "user", "content": "Count, please."}
TOOL_SCHEMAS = [
    {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
]
ASSISTANT = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "count", "arguments": {}}}],
}
REPLIES = [
    [{"role": "tool", "name": "count", "tool_call_id": "1", "content": "3"}],
    [{"role": "tool", "name": "count", "tool_call_id": "1", "content": text} for text in ("3", "4")],
    [{"role": "user", "content": "And now?"}],
]


async def conversation(loop: Any, replies: list[dict[str, Any]], *, prompt_length: int) -> list[Any]:
    loop.rollout_config = SimpleNamespace(prompt_length=prompt_length)
    prompt = await loop.ct_build_initial_tokens([USER], tools=TOOL_SCHEMAS)
    completion = encoded(call_text("count") + "<|im_end|>")
    logprobs = [-0.5] * len(completion)
    first, mask, values = await loop.ct_merge_assistant_token(
        prompt, completion, [], [], assistant_logprobs=logprobs
    )
    before = [USER, ASSISTANT]
    second, mask, values = await loop.ct_merge_context_msg(
        before, [*before, *replies], first.token_ids, mask, values, tools=TOOL_SCHEMAS
    )
    return [prompt, first.token_ids, second.token_ids, mask, values]


@pytest.mark.parametrize("replies", REPLIES)
@pytest.mark.parametrize("prompt_length", [400, 8])
async def test_a_conversation_has_verls_tokens(replies: list[dict[str, Any]], prompt_length: int) -> None:
    ours = ContinuousTokens()
    ours.template = ChatTemplate(small_tokenizer())
    verls = object.__new__(type("Loop", (AgentLoopBase,), {"run": None}))
    verls.loop = asyncio.get_running_loop()
    builder = create_continuous_token_builder(small_tokenizer(), hf_model_type="qwen3")
    verls.continuous_token_builder = builder
    found = await conversation(ours, replies, prompt_length=prompt_length)
    assert found == await conversation(verls, replies, prompt_length=prompt_length)
    assert len(found[0]) <= prompt_length


VERSIONS = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"))
"""Fields that verl's client adds to completions of servers without versions."""


class EngineClient:
    """verl's client of an embedded engine."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> TokenOutput:
        params = sampling_params | {"max_tokens": min(24, sampling_params.get("max_tokens", 24))}
        return await completion(
            self._server, request_id, prompt_ids=prompt_ids, sampling_params=params, **VERSIONS
        )


def dataset_batch(config: Any, file: Path) -> DataProto:
    """Return verl's batch of a file, as its V0 trainer sends it for validation."""
    dataset = RLHFDataset(str(file), small_tokenizer(), config.data)
    batch = DataProto.from_single_dict(collate_fn([dataset[index] for index in range(len(dataset))]))
    return DataProto.from_dict(
        non_tensors={**batch.non_tensor_batch, "uid": np.array(list("abcd"), dtype=object)},
        meta_info={"validate": True},
    )


async def test_a_real_engine_gives_both_managers_the_same_batch_of_a_gsm8k_file(
    model: Path, gsm8k: Path
) -> None:
    config = verl_config(model, val_kwargs__temperature=0)
    server = EmbeddedServer(Qwen3ForCausalLM.from_pretrained(model))
    try:
        client = EngineClient(server)
        verls = await AgentLoopWorker(config, client).generate_sequences(dataset_batch(config, gsm8k))
        ours = await VerlRolloutWorker(config, client).generate_batch(dataset_batch(config, gsm8k))
    finally:
        await server.close()
    assert ours.batch["response_mask"].sum() > 0
    logprobs = [batch.batch.pop("rollout_log_probs") for batch in (ours, verls)]
    assert (logprobs[0] - logprobs[1]).abs().max() < 1e-4  # batches of the engine differ in size
    for batch in (ours, verls):
        batch.meta_info["timing"] = dict.fromkeys(batch.meta_info.pop("metrics")[0])
    assert_same(ours, verls)


@pytest.fixture(scope="module")
def step(model: Path) -> tuple[DataProto, DataProto]:
    """Return the rows of a step, and the batch of their rollouts."""
    prompts = ["a", "a", "b", "b"]
    rows = batch_of(prompts, uid=["1", "1", "2", "2"], data_source=["x"] * 4, index=[0, 0, 1, 1])
    lengths = iter(range(1, 100))
    client = ScriptedClient(lambda text: "x" * next(lengths) + "<|im_end|>")
    score = scored(lambda text: float(len(text) % 3))
    return rows, run_ours(verl_config(model), client, rows.select(deepcopy=True), **score)


def test_a_step_computes_advantages_and_metrics(step: tuple[DataProto, DataProto]) -> None:
    rows, rollouts = step
    rows = DataProto.from_dict(tensors={"dummy": torch.zeros(4, 1)}, non_tensors=rows.non_tensor_batch)
    batch = rows.union(rollouts)
    reward, extra = extract_reward(batch)
    assert reward.sum(dim=1).tolist() == rollouts.non_tensor_batch["score"].tolist()
    assert set(extra) == {"acc", "score"}
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = reward
    batch = compute_advantage(batch, adv_estimator=AdvantageEstimator.GRPO)
    advantages = batch.batch["advantages"]
    assert torch.equal(advantages != 0, (batch.batch["response_mask"] * advantages) != 0)
    assert advantages.abs().sum() > 0
    batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(dim=-1).tolist()
    timing = {"gen": 1.0, "step": 2.0, "old_log_prob": 1.0, **rollouts.meta_info["timing"]}
    metrics = {
        **compute_data_metrics(batch=batch, use_critic=False),
        **compute_timing_metrics(batch=batch, timing_raw=timing),
        **compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=1),
    }
    assert metrics["num_turns/mean"] == 2
    assert metrics["response/aborted_ratio"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_batches_are_concatenated_padded_unpadded_and_validated(step: tuple[DataProto, DataProto]) -> None:
    _, rollouts = step
    rollouts.meta_info = {}
    padded, num_padding = pad_dataproto_to_divisor(rollouts, 3)
    assert (len(padded), num_padding) == (6, 2)
    again = unpad_dataproto(padded, num_padding)
    assert torch.equal(again.batch["input_ids"], rollouts.batch["input_ids"])
    twice = DataProto.concat([rollouts, again])
    assert len(twice) == 8
    assert len(twice.chunk(2)[0]) == len(twice.repeat(2)) // 4
    scores = {"score": rollouts.non_tensor_batch["score"].tolist()}
    found = process_validation_metrics(["x"] * 4, ["1", "1", "2", "2"], scores)
    assert found["x"]["score"]["mean@2"] == pytest.approx(np.mean(scores["score"]))
