"""vLLM server with a mixture of experts. `transformers` stacks the parameters of its experts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_loop.checks import Reference
from agent_loop.types import SamplingParams
from tests.engines.common import LOG_PROB_TOLERANCE, largest_difference, make_model_folder, prompts
from tests.engines.vllm_cases import VLLM, started

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def test_published_experts_give_the_log_probs_of_the_model_that_was_published(tmp_path: Path) -> None:
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
