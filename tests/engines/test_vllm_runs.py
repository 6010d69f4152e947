"""vLLM servers that are started for one test: contract, experts, whole runs, and starts that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_loop.checks import Reference
from agent_loop.errors import ConfigError, ServerDied, ServerTimeout
from agent_loop.types import SamplingParams, StopReason
from tests.engines.common import (
    LOG_PROB_TOLERANCE,
    assert_is_token_exact,
    check_contract,
    largest_difference,
    load_reference,
    make_model_folder,
    prompts,
    roll_out,
    train_three_steps,
)
from tests.engines.vllm_cases import VLLM, started

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model that calls the example's tools. Its output head is tied to its embedding."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "warm", is_tied=True, warm_start_steps=300)


def test_vllm_keeps_the_contract_of_servers_with_untied_weights(tmp_path: Path) -> None:
    path = make_model_folder(tmp_path / "untied", is_tied=False)
    report = asyncio.run(check_contract(VLLM.server(path), path))
    assert len(report.named("passed")) > 15


def test_published_experts_give_the_log_probs_of_the_model_that_was_published(tmp_path: Path) -> None:
    """`transformers` stacks the parameters of experts."""
    dense = Reference.load(make_model_folder(tmp_path, is_tied=False)).model
    sizes = dense.config.to_dict() | {"model_type": "qwen3_moe", "architectures": None}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | EXPERTS)).save_pretrained(tmp_path)
    old = Reference.load(tmp_path)
    new = old.shifted(seed=1)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in dict(new.weights())

    (prompt,), params = prompts(1), SamplingParams(max_tokens=20, ignore_eos=True)
    server = VLLM.server(tmp_path)
    with started(server) as runner:
        before = runner.run(server.generate(prompt, params, "before"))
        assert largest_difference(old.model, prompt, before, temperature=1.0) < LOG_PROB_TOLERANCE
        runner.run(server.update_weights(new.weights(), weight_version=1))
        after = runner.run(server.generate(prompt, params, "after"))
    assert after.weight_version == 1
    assert largest_difference(new.model, prompt, after, temperature=1.0) < LOG_PROB_TOLERANCE
    assert largest_difference(old.model, prompt, after, temperature=1.0) > 0.1


def test_64_rows_of_the_tool_agent_are_token_exact(model_path: Path) -> None:
    trajectories = asyncio.run(roll_out(VLLM, model_path))
    outputs = [trajectory.output for trajectory in trajectories]
    assert len(outputs) == 64
    assert not [output for output in outputs if output.stop_reason == StopReason.FAILED]
    assert any(output.num_turns > 2 for output in outputs), "no tool was called"
    assert_is_token_exact(load_reference(model_path), trajectories)


def test_the_engine_has_the_weights_of_each_of_three_steps_of_grpo(model_path: Path, tmp_path: Path) -> None:
    asyncio.run(train_three_steps(VLLM, model_path, folder=tmp_path))


def test_the_error_of_an_engine_that_fails_ends_with_its_last_log_lines(model_path: Path) -> None:
    server = VLLM.server(model_path, rollout__engine_kwargs__block_size=16)
    with pytest.raises(ServerDied, match="No common block size"):
        asyncio.run(server.start())


def test_an_engine_that_takes_too_long_to_start_is_killed(model_path: Path) -> None:
    server = VLLM.server(model_path, rollout__start_timeout_s=6)
    with pytest.raises(ServerTimeout, match=r"within 6 s(.|\n)*its last log lines"):
        asyncio.run(server.start())
    assert server._process.ended.is_set()


def test_an_option_that_vllm_does_not_have_is_refused_by_name(model_path: Path) -> None:
    server = VLLM.server(model_path, rollout__engine_kwargs__max_num_seq=8)
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        asyncio.run(server.start())
