"""Micro-batches contain every token and little padding, and rows in them are computed as they are alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from agent_loop.config import ActorConfig, Config
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.actor import Actor
from agent_loop.training.forward import response_logprobs
from agent_loop.training.learner import Learner
from agent_loop.training.losses.logprobs import token_logprobs
from agent_loop.training.micro_batches import Layout, MicroBatch, micro_batches
from agent_loop.training.policy import make_exact
from agent_loop.training.process_group import ProcessGroup
from tests.families.batches import check_logprobs, ragged_batch
from tests.families.zoo import FAMILIES
from tests.training.fakes import PAD, sample_trajectories, tiny_policy


@pytest.fixture(scope="module")
def wide() -> RolloutBatch:
    """Return a batch with columns of padding alone."""
    return assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD, prompt_width=9, response_width=12)


def cut(batch: RolloutBatch, *, max_tokens: int = 10_000, **options: Any) -> list[MicroBatch]:
    options = {"rows": torch.arange(len(batch)), "device": torch.device("cpu"), **options}
    return list(micro_batches(batch, max_tokens=max_tokens, **options))


@pytest.mark.parametrize("max_tokens", [1, 20, 50, 10_000])
def test_every_token_is_in_one_micro_batch_which_keeps_to_its_budget(
    wide: RolloutBatch, max_tokens: int
) -> None:
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


class OwnModel(LlamaForCausalLM):
    """Model of a known type whose forward is not that of `transformers`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs


@pytest.mark.parametrize("name", ["rwkv", "llama4_text-temperature", "own"])
def test_a_model_that_padding_may_change_is_trained_one_row_at_a_time(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = FAMILIES["llama" if name == "own" else name]
    model: Any = OwnModel(family.config()).eval() if name == "own" else family.build()
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
