"""Micro-batches and heads: rows are computed as they are alone, and no tensor holds all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agent_loop.config import ActorConfig, Config, ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.servers.embedded.model_types import logit_scaling
from agent_loop.training import forward
from agent_loop.training.actor import Actor
from agent_loop.training.adapters import add_adapters
from agent_loop.training.forward import ResponseLogProbs, response_logprobs
from agent_loop.training.learner import Learner
from agent_loop.training.losses import logprobs as vocabulary_blocks
from agent_loop.training.losses.logprobs import LogitTransform, token_logprobs
from agent_loop.training.micro_batches import Layout, MicroBatch, micro_batches
from agent_loop.training.policy import make_exact
from agent_loop.training.prefix_tree.attention import use_tree_attention
from agent_loop.training.process_group import ProcessGroup
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import FAMILIES
from tests.training.fakes import PAD, VOCABULARY, sample_trajectories, tiny_policy


@pytest.fixture(scope="module")
def wide() -> RolloutBatch:
    """Return a batch with columns of padding alone."""
    return assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD, prompt_width=9, response_width=12)


def cut(batch: RolloutBatch, *, max_tokens: int = 10_000, **options: Any) -> list[MicroBatch]:
    options = {"rows": torch.arange(len(batch)), "device": torch.device("cpu"), **options}
    return list(micro_batches(batch, max_tokens=max_tokens, **options))


@pytest.mark.parametrize("max_tokens", [1, 20, 50, 10_000])
def test_each_token_is_in_one_micro_batch_which_keeps_its_budget(wide: RolloutBatch, max_tokens: int) -> None:
    parts = cut(wide, max_tokens=max_tokens)
    assert sorted(torch.cat([part.rows_B for part in parts]).tolist()) == list(range(len(wide)))
    for part in parts:
        assert part.input_ids_BW.numel() <= max_tokens or len(part.rows_B) == 1
        whole, attended = wide[part.rows_B], part.attention_mask_BW.bool()
        for mine, name in ((part.input_ids_BW, "input_ids"), (part.position_ids, "position_ids")):
            assert torch.equal(mine[attended], whole[name][whole["attention_mask"].bool()])
        sampled = whole["responses"][whole["response_mask"].bool()]
        assert torch.equal(part.response_ids_BR[part.mask_BR.bool()], sampled)
        assert torch.equal(part.cut(wide["responses"]), part.response_ids_BR)


def test_logprobs_of_a_padded_micro_batch_equal_those_of_each_row_alone(wide: RolloutBatch) -> None:
    model = tiny_policy()
    for part in cut(wide, max_tokens=60):
        found = response_logprobs(model, part, temperature=0.8)
        for index, row in enumerate(part.rows_B.tolist()):
            ids = wide["input_ids"][row][wide["attention_mask"][row].bool()]
            num_prompt = int(wide["attention_mask"][row, :9].sum())
            logits_TV = model(ids[None]).logits[0, num_prompt - 1 : -1]
            length = len(logits_TV)
            expected = token_logprobs(
                logits_TV, token_ids_M=ids[num_prompt:], place_M=torch.arange(length), temperature=0.8
            )
            is_model_T = part.mask_BR[index, :length].bool()
            for found_R, expected_T in (
                (found.sampled_BR[index], expected.sampled_M),
                (found.entropy_BR[index], expected.entropy_M),
            ):
                torch.testing.assert_close(found_R[:length], expected_T * is_model_T, atol=1e-5, rtol=1e-5)
                assert not found_R[length:].any()


class RolledLogits:
    """Mixin of models of a known type whose forward is not that of `transformers`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs


class RolledLlama(RolledLogits, transformers.LlamaForCausalLM): ...


class RolledQwen(RolledLogits, transformers.Qwen3ForCausalLM): ...


@pytest.mark.parametrize("name", ["rwkv", "llama4_text-temperature", "own"])
def test_models_that_padding_may_change_train_single_rows(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = FAMILIES["llama" if name == "own" else name]
    model: Any = RolledLlama(family.config()).eval() if name == "own" else family.build()
    actor = Actor(model, config=ActorConfig(max_tokens_per_micro_batch=10_000))
    [message] = [record.getMessage() for record in caplog.records if record.name.startswith("agent_loop.")]
    assert message.startswith(f"{type(model).__name__} is of a type")
    batch = ragged_batch(limits=family.limits)
    check_logprobs(actor.logprobs(batch), model, batch)


class CountedOperations(TorchDispatchMode):
    """Numbers of forward operations of attention and of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attentions = self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.num_attentions += "attention" in name and "backward" not in name
        self.num_products += name == "aten::mm"
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_attention_once_and_changes_no_gradient(batch: RolloutBatch) -> None:
    [part] = cut(batch)

    def computed(kind: Any) -> tuple[CountedOperations, list[Tensor]]:
        model = tiny_policy()
        make_exact(model, gradient_checkpointing=kind)
        with CountedOperations() as counted:
            found = response_logprobs(model, part, temperature=0.8)
            gradients = torch.autograd.grad(found.sampled_BR.sum(), list(model.parameters()))
        return counted, list(gradients)

    none, full, selective = (computed(kind) for kind in (False, True, "selective"))
    num_layers, num_attentions = tiny_policy().config.num_hidden_layers, none[0].num_attentions
    assert full[0].num_attentions - num_attentions == num_layers
    assert selective[0].num_attentions == num_attentions
    assert none[0].num_products < selective[0].num_products == full[0].num_products
    for gradients in (full[1], selective[1]):
        for found, expected in zip(gradients, none[1], strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


class OneOfMany(ProcessGroup):
    """Process group that records what this rank gathers, and returns given values for the other ranks."""

    def __init__(self, *, rank: int, size: int, others: list[int] | None = None) -> None:
        super().__init__(rank=rank, size=size)
        self.given: list[int] = []
        self._others = others or []

    def all_gather(self, value: Any) -> list[Any]:
        self.given.append(value)
        return [value, *self._others]


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize(("num_rows", "size"), [(24, 2), (23, 3), (2, 4), (1, 2)])
def test_each_row_counts_in_one_process_and_all_run_equally_many_micro_batches(
    batch: RolloutBatch, num_rows: int, size: int, layout: Layout
) -> None:
    options: dict[str, Any] = {"rows": torch.arange(num_rows), "layout": layout, "max_tokens": 40}
    asked = [OneOfMany(rank=rank, size=size) for rank in range(size)]
    for process_group in asked:
        cut(batch, process_group=process_group, **options)
    counts = [count for process_group in asked for count in process_group.given]
    shares = [
        cut(batch, process_group=OneOfMany(rank=rank, size=size, others=counts), **options)
        for rank in range(size)
    ]
    assert len({len(share) for share in shares}) == 1
    counted = [part.rows_B for share in shares for part in share if not part.is_spare]
    assert sorted(torch.cat(counted).tolist()) == list(range(num_rows))


def test_images_are_refused_before_other_ranks_get_a_command(batch: RolloutBatch) -> None:
    actor = Actor(tiny_policy(), config=Config().actor)
    learner = Learner(Config(), actor=actor, process_group=ProcessGroup(size=2))
    batch = batch.clone()
    batch["attachments"] = torch.zeros(len(batch))
    with pytest.raises(ConfigError, match=r"images or videos.*num_processes=1"):
        learner.learn(batch)


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


def qwen(*, vocab_size: int = VOCABULARY, tied: bool = True) -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(vocab_size=vocab_size, head_dim=16, tie_word_embeddings=tied, **SIZES)
    )


def with_adapters() -> transformers.PreTrainedModel:
    model = qwen(tied=False)
    add_adapters(model, config=ModelConfig(lora_rank=4, target_modules=["q_proj", "lm_head"]), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def of(config: Any, **settings: Any) -> Callable[[], transformers.PreTrainedModel]:
    configured = config(vocab_size=VOCABULARY, **settings, **SIZES)
    return lambda: transformers.AutoModelForCausalLM.from_config(configured)


MODELS: dict[str, tuple[Callable[[], transformers.PreTrainedModel], LogitTransform]] = {
    "tied": (qwen, LogitTransform()),
    "untied": (lambda: qwen(tied=False), LogitTransform()),
    "bias": (of(transformers.PhiConfig), LogitTransform()),
    "soft cap": (
        of(transformers.Gemma2Config, head_dim=16, final_logit_softcapping=2.0),
        LogitTransform(soft_cap=2.0),
    ),
    "factor": (of(transformers.Cohere2Config, logit_scale=0.25), LogitTransform(factor=0.25)),
    "divisor": (of(transformers.GraniteConfig, logits_scaling=8.0), LogitTransform(factor=1 / 8)),
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


def computed(
    model: transformers.PreTrainedModel, part: MicroBatch, *, entropy_has_gradient: bool
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
    model: transformers.PreTrainedModel, part: MicroBatch, *, entropy_has_gradient: bool
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
def test_blocks_equal_full_logits(name: str, entropy_has_gradient: bool, batch: RolloutBatch) -> None:
    build, transform = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    scaling = logit_scaling(model)
    assert scaling is not None
    assert LogitTransform(*scaling) == transform
    assert_equals_full_logits(model, cut(batch)[0], entropy_has_gradient=entropy_has_gradient)


def test_rows_that_share_prefixes_equal_full_logits(batch: RolloutBatch) -> None:
    model = qwen().eval()
    use_tree_attention(model)
    assert_equals_full_logits(model, cut(batch, layout="tree")[0], entropy_has_gradient=True)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(results) if isinstance(each, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return results


@pytest.mark.parametrize("entropy_has_gradient", [False, True])
def test_no_tensor_of_an_update_holds_all_logits(batch: RolloutBatch, entropy_has_gradient: bool) -> None:
    vocabulary = 2000
    model, part = qwen(vocab_size=vocabulary).eval(), cut(batch)[0]
    num_sampled, hidden_size = int(part.mask_BR.sum()), SIZES["hidden_size"]
    assert num_sampled > 2 * hidden_size

    def largest() -> int:
        with LargestTensor() as largest:
            computed(model, part, entropy_has_gradient=entropy_has_gradient)
        return largest.num_elements

    assert largest() == vocabulary * hidden_size
    with full_logits():
        assert largest() >= num_sampled * vocabulary


def test_a_model_with_an_unknown_function_after_its_head_uses_full_logits(batch: RolloutBatch) -> None:
    model, part = RolledQwen(tiny_policy().config).eval(), cut(batch)[0]
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
