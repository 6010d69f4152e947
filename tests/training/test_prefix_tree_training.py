"""Training on the prefix tree of a batch has the loss and the gradients of single rows."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.forward import as_tree, response_logprobs
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.prefix_tree.attention import use_tree_attention
from tests.harness import examples
from tests.training.fakes import tiny_policy
from tests.training.trees import MODELS, forked_batch, tiny_model, tree_batch


def cut(batch: RolloutBatch, *, max_tokens: int = 10_000, shares: bool) -> list[MicroBatch]:
    rows, device = torch.arange(len(batch)), torch.device("cpu")
    layout = "tree" if shares else "alone"
    return list(micro_batches(batch, rows=rows, max_tokens=max_tokens, device=device, layout=layout))


def learn(model: Any, batch: RolloutBatch, parts: list[MicroBatch]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return log-probs, entropy and the gradients of a loss in which each row has advantages of its own."""
    model.zero_grad()
    advantages_BR = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(0))
    logprobs_BR, entropy_BR = torch.zeros(advantages_BR.shape), torch.zeros(advantages_BR.shape)
    for part in parts:
        found = response_logprobs(model, part, temperature=0.8)
        loss = (found.sampled_BR * part.cut(advantages_BR) - 0.1 * found.entropy_BR).sum()
        (loss / float(batch["response_mask"].sum())).backward()
        part.put(found.sampled_BR.detach(), into=logprobs_BR)
        part.put(found.entropy_BR.detach(), into=entropy_BR)
    return logprobs_BR, entropy_BR, [each.grad for each in model.parameters()]


def check_equal(model: Any, batch: RolloutBatch, *, max_tokens: int) -> None:
    """Compare with rows alone under torch's own attention."""
    model.set_attn_implementation("sdpa")
    expected_logprobs, expected_entropy, expected = learn(model, batch, cut(batch, shares=False))
    use_tree_attention(model)
    logprobs, entropy, found = learn(model, batch, cut(batch, max_tokens=max_tokens, shares=True))
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@examples(6, derandomize=True)
@given(seed=st.integers(0, 10_000), num_rows=st.integers(1, 12), max_tokens=st.sampled_from([1, 60, 10_000]))
def test_loss_and_gradients_of_a_tree_equal_those_of_rows_alone(
    kind: str, seed: int, num_rows: int, max_tokens: int
) -> None:
    batch = tree_batch(Random(seed), num_rows=num_rows, longest=25)
    check_equal(tiny_model(kind), batch, max_tokens=max_tokens)


def test_a_shared_prefix_is_computed_once() -> None:
    [part] = cut(forked_batch(), shares=True)
    layout, before_M = as_tree(part)
    # 10 tokens of the longest row. Of the other rows the tokens after their forks: a 4, a 13, a 12 and nothing.
    assert layout.num_tokens == 13
    after = layout.input_ids_T[before_M]
    assert sorted(after.tolist()) == sorted([6, 7, 9, 10, 11] * 3 + [6] + [6, 7, 9] + [6, 7])


def test_the_attention_of_trees_computes_padded_rows_as_before() -> None:
    model, batch = tiny_policy(), forked_batch()
    rows, device = torch.arange(len(batch)), torch.device("cpu")
    [padded] = micro_batches(batch, rows=rows, max_tokens=10_000, device=device)
    before = response_logprobs(model, padded, temperature=1.0)
    use_tree_attention(model)
    after = response_logprobs(model, padded, temperature=1.0)
    assert torch.equal(before.sampled_BR, after.sampled_BR)
