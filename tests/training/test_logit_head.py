"""Log-probs in blocks of the vocabulary equal those of full logits, and no tensor holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent_loop.config import ModelConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.servers.embedded.model_types import logit_scaling
from agent_loop.training import forward
from agent_loop.training.adapters import add_adapters
from agent_loop.training.forward import ResponseLogProbs, response_logprobs
from agent_loop.training.losses import logprobs as vocabulary_blocks
from agent_loop.training.losses.logprobs import LogitTransform
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.prefix_tree.attention import use_tree_attention
from tests.training.fakes import PAD, VOCABULARY, tiny_policy

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
NUM_CANDIDATES = 3


def qwen(*, vocab_size: int = VOCABULARY, tied: bool = True) -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=vocab_size, head_dim=16, tie_word_embeddings=tied, **SIZES)
    )


def with_adapters() -> PreTrainedModel:
    model = qwen(tied=False)
    add_adapters(model, config=ModelConfig(lora_rank=4, target_modules=["q_proj", "lm_head"]), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def of(model: Any, config: Any, **settings: Any) -> Callable[[], PreTrainedModel]:
    return lambda: model(config(vocab_size=VOCABULARY, **settings, **SIZES))


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], LogitTransform]] = {
    "tied": (qwen, LogitTransform()),
    "untied": (lambda: qwen(tied=False), LogitTransform()),
    "bias": (of(PhiForCausalLM, PhiConfig), LogitTransform()),
    "soft cap": (
        of(Gemma2ForCausalLM, Gemma2Config, head_dim=16, final_logit_softcapping=2.0),
        LogitTransform(soft_cap=2.0),
    ),
    "factor": (of(Cohere2ForCausalLM, Cohere2Config, logit_scale=0.25), LogitTransform(factor=0.25)),
    "divisor": (of(GraniteForCausalLM, GraniteConfig, logits_scaling=8.0), LogitTransform(factor=1 / 8)),
    "adapters": (with_adapters, LogitTransform()),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a vocabulary have several blocks, of which the last is smaller."""
    monkeypatch.setattr(vocabulary_blocks, "MIN_BLOCK", 7)
    monkeypatch.setitem(vocabulary_blocks.BLOCK_ELEMENTS, "cpu", 1)


@contextmanager
def full_logits() -> Iterator[None]:
    """Let the policy compute all logits at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "logit_scaling", lambda model: None)
        yield


def one_micro_batch(batch: RolloutBatch, **settings: Any) -> MicroBatch:
    rows = torch.arange(len(batch))
    [part] = micro_batches(batch, rows=rows, max_tokens=10_000, device=torch.device("cpu"), **settings)
    return part


def computed(
    model: PreTrainedModel, part: MicroBatch, *, entropy_has_gradient: bool
) -> tuple[ResponseLogProbs, dict[str, Tensor]]:
    """Return log-probs, and the gradients of a loss with a random weight for each value."""
    generator = torch.Generator().manual_seed(0)
    candidates = torch.randint(VOCABULARY, (*part.mask_BR.shape, NUM_CANDIDATES), generator=generator)
    found = response_logprobs(
        model,
        part,
        temperature=0.7,
        entropy_has_gradient=entropy_has_gradient,
        candidate_ids_BRK=candidates,
    )
    assert found.candidates_BRK is not None
    assert found.entropy_BR.requires_grad == entropy_has_gradient
    values = [found.sampled_BR, found.candidates_BRK] + [found.entropy_BR] * entropy_has_gradient
    loss = sum((each * torch.randn(each.shape, generator=generator)).sum() for each in values)
    model.zero_grad()
    loss.backward()
    return found, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equals_full_logits(
    model: PreTrainedModel, part: MicroBatch, *, entropy_has_gradient: bool
) -> None:
    def assert_near(found: Tensor, expected: Tensor) -> None:
        assert float((found - expected).detach().abs().max()) <= 1e-5 * float(expected.detach().abs().max())

    found, gradients = computed(model, part, entropy_has_gradient=entropy_has_gradient)
    with full_logits():
        expected, expected_gradients = computed(model, part, entropy_has_gradient=entropy_has_gradient)
    for name in ("sampled_BR", "entropy_BR", "candidates_BRK"):
        assert_near(getattr(found, name), getattr(expected, name))
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert_near(gradient, expected_gradients[name])


@pytest.mark.parametrize("entropy_has_gradient", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_equal_those_of_full_logits(
    name: str, entropy_has_gradient: bool, batch: RolloutBatch
) -> None:
    build, transform = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    scaling = logit_scaling(model)
    assert scaling is not None
    assert LogitTransform(*scaling) == transform
    assert_equals_full_logits(model, one_micro_batch(batch), entropy_has_gradient=entropy_has_gradient)


def test_rows_that_share_prefixes_equal_full_logits(batch: RolloutBatch) -> None:
    model = qwen().eval()
    use_tree_attention(model)
    assert_equals_full_logits(model, one_micro_batch(batch, layout="tree"), entropy_has_gradient=True)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(results) if isinstance(each, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return results


@pytest.mark.parametrize("entropy_has_gradient", [False, True])
def test_no_tensor_of_an_update_holds_the_logits_of_all_tokens(
    batch: RolloutBatch, entropy_has_gradient: bool
) -> None:
    vocabulary = 2000
    model, part = qwen(vocab_size=vocabulary).eval(), one_micro_batch(batch)
    num_sampled, hidden_size = int(part.mask_BR.sum()), SIZES["hidden_size"]
    assert num_sampled > 2 * hidden_size

    def largest() -> int:
        with LargestTensor() as largest:
            computed(model, part, entropy_has_gradient=entropy_has_gradient)
        return largest.num_elements

    assert largest() == vocabulary * hidden_size
    with full_logits():
        assert largest() >= num_sampled * vocabulary


class ShiftedLogits(Qwen3ForCausalLM):
    """Model that does something unknown with the outputs of its head."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs


def test_a_model_with_an_unknown_function_after_its_head_uses_full_logits(batch: RolloutBatch) -> None:
    model, part = ShiftedLogits(tiny_policy().config).eval(), one_micro_batch(batch)
    assert_equals_full_logits(model, part, entropy_has_gradient=True)
    with LargestTensor() as largest:
        computed(model, part, entropy_has_gradient=False)
    assert largest.num_elements >= int(part.mask_BR.sum()) * VOCABULARY


def test_a_token_that_is_impossible_adds_nothing() -> None:
    bias_V = torch.zeros(20).index_fill(0, torch.tensor([3, 15]), -torch.inf)
    inputs_NH, weight_VH = torch.randn(4, 5, requires_grad=True), torch.randn(20, 5, requires_grad=True)
    head = vocabulary_blocks.LinearHead((inputs_NH,), (weight_VH,), bias_V, LogitTransform())
    found = vocabulary_blocks.blockwise_logprobs(
        head, token_ids_M=torch.tensor([0, 1]), place_M=torch.tensor([1, 3]), temperature=1.0
    )
    gradients = torch.autograd.grad(found.sampled_M.sum() + found.entropy_M.sum(), [inputs_NH, weight_VH])
    assert all(each.isfinite().all() for each in (found.sampled_M, found.entropy_M, *gradients))
    assert not gradients[1][[3, 15]].any()
