"""A prefix tree has each distinct token once, and training on it has the loss and gradients of single rows."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.forward import as_tree, response_logprobs
from agent_loop.training.micro_batches import Layout, MicroBatch, micro_batches
from agent_loop.training.prefix_tree import attention
from agent_loop.training.prefix_tree.attention import use_tree_attention
from agent_loop.training.prefix_tree.layout import TreeLayout, lay_out
from agent_loop.training.prefix_tree.tree import SortedRows
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.harness import examples
from tests.training.fakes import PAD, VOCABULARY, tiny_policy

CPU = torch.device("cpu")


def arrays(rows: Sequence[Sequence[int]]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return [np.array(row, dtype=np.int64) for row in rows]


def prefixes(rows: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    random = Random(draw(st.integers(0, 10_000)))
    return random_tree(
        random,
        num_rows=draw(st.integers(1, 25)),
        vocabulary=draw(st.sampled_from([1, 2, 50])),
        longest=draw(st.sampled_from([2, 9, 90])),
    )


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, window: int | None
) -> Tensor:
    """Return the attention with a mask in which each token of a row sees those before it in the row."""
    is_visible = torch.zeros((layout.num_tokens, layout.num_tokens), dtype=torch.bool)
    for places in map(torch.from_numpy, layout.places):
        row = torch.ones((len(places), len(places)), dtype=torch.bool).tril()
        if window is not None:
            row = row.triu(1 - window)
        is_visible[places[:, None], places] |= row
    repeats = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * 0.3
    weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
    return weights @ value.repeat_interleave(repeats, 1)


def random_heads(num_tokens: int, *, is_spread: bool = False) -> list[Tensor]:
    """Return a query of four heads, and keys and values of two; values are shorter.

    The numbers of a token are not adjacent if `is_spread`.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    heads = [
        torch.randn((1, heads, num_tokens, size), generator=generator, dtype=torch.float64)
        for heads, size in ((4, 8), (2, 8), (2, 6))
    ]
    return [(each.mT.contiguous().mT if is_spread else each).requires_grad_() for each in heads]


@examples(60)
@given(trees())
def test_each_distinct_token_is_in_the_layout_once(rows: list[list[int]]) -> None:
    layout = lay_out(arrays(rows), device=CPU)
    assert layout.num_tokens == len(prefixes(rows))
    for row, places in zip(rows, layout.places, strict=True):
        assert layout.input_ids_T[places].tolist() == row
        assert layout.depth_T[places].tolist() == list(range(len(row)))


@examples(40)
@given(trees(), st.sampled_from([None, 1, 3, 40]), st.booleans())
def test_attention_over_a_tree_equals_attention_with_a_dense_mask(
    rows: list[list[int]], window: int | None, is_spread: bool
) -> None:
    layout = lay_out(arrays(rows), device=CPU)
    heads = random_heads(layout.num_tokens, is_spread=is_spread)
    found = attention._blockwise(*heads, layout=layout, window=window, scale=0.3)
    expected = attend_densely(*heads, layout, window)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    direction = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(0))
    for mine, theirs in zip(
        torch.autograd.grad(found, heads, direction),
        torch.autograd.grad(expected, heads, direction),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mask_for_gpus_selects_the_same_tokens(window: int | None) -> None:
    layout = lay_out(arrays(random_tree(Random(0), num_rows=9, vocabulary=2, longest=9)), device=CPU)
    with torch.no_grad():
        query, key, value = (each.detach()[..., :6] for each in random_heads(layout.num_tokens))
        options: dict[str, Any] = {"layout": layout, "window": window, "scale": 0.3}
        found = attention._flex(query, key, value, **options)
        torch.testing.assert_close(found, attention._blockwise(query, key, value, **options))


@examples(60)
@given(trees(), st.integers(1, 200), st.integers(1, 4))
def test_runs_hold_all_rows_once_within_a_budget(rows: list[list[int]], max_tokens: int, number: int) -> None:
    sorted_rows = SortedRows(dict(enumerate(arrays(rows))))
    assert sorted_rows.num_distinct == len(prefixes(rows))
    runs = sorted_rows.divided(max_tokens=max_tokens)
    assert sorted(row for run in runs for row in run) == list(range(len(rows)))
    for run in runs:
        assert len(prefixes([rows[row] for row in run])) <= max_tokens or len(run) == 1
    shares = sorted_rows.shares(number)
    assert len(shares) <= number
    assert sorted(row for share in shares for row in share) == list(range(len(rows)))


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GEMMA: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window_pattern": 2}
CONFIGS: dict[str, Any] = {
    "qwen3": tiny_policy().config,
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, **GEMMA, sliding_window=4),
    "mistral": transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
}
"""Several families; Gemma 3 and Mistral have a sliding window of four tokens."""


def random_tree(random: Random, *, num_rows: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Return rows of at least one token, each of which branches off a random token of another row."""
    rows: list[list[int]] = [[random.randrange(vocabulary) for _ in range(random.randint(1, longest))]]
    while len(rows) < num_rows:
        start = random.choice(rows)
        start = start[: random.randint(0, len(start))]
        end = [random.randrange(vocabulary) for _ in range(random.randint(0 if start else 1, longest))]
        rows.append(start + end)
    return rows


def trajectory(prompt: Sequence[int], *runs: tuple[Sequence[int], bool]) -> Trajectory:
    """Return a trajectory of a prompt and runs of tokens, each with whether the model sampled it."""
    segments = [Segment(as_token_ids(list(prompt)), Origin.PROMPT)]
    for ids, is_models in runs:
        tokens = as_token_ids(list(ids))
        logprobs = np.full(len(ids), -1.0, np.float32)
        segments.append(
            Segment(tokens, Origin.MODEL, logprobs, 0) if is_models else Segment(tokens, Origin.TOOL)
        )
    return Trajectory(AgentLoopOutput(segments=segments), {}, 0, 0, 0.0, {})


def tree_batch(random: Random, *, num_rows: int, longest: int) -> RolloutBatch:
    """Return a batch of a random tree of turns, whose rows have prompts of one to five tokens."""
    rows = random_tree(random, num_rows=num_rows, vocabulary=VOCABULARY - 2, longest=longest)
    trajectories: list[Trajectory] = []
    for row in rows:
        ids = [token + 2 for token in (*row, *random.choices(range(5), k=2))]
        first = random.randint(1, min(5, len(ids) - 1))
        second = random.randint(first + 1, len(ids))
        runs = [(ids[first:second], True), (ids[second:], False)]
        if random.random() < 0.5 and second < len(ids) - 1:
            runs = [(ids[first:second], True), (ids[second:-1], False), (ids[-1:], True)]
        trajectories.append(trajectory(ids[:first], *(run for run in runs if run[0])))
    return assemble(trajectories, pad_token_id=PAD)


def forked_batch() -> RolloutBatch:
    """Return rows that fork after the prompt, after a tool's reply, at the last token and nowhere.

    One row is a prefix of another.
    """
    prompt, tool = [4, 5, 6], ([8, 9], False)
    return assemble(
        [
            trajectory(prompt, ([7, 2], True), tool, ([10, 11, 3], True)),
            trajectory(prompt, ([12], True)),
            trajectory(prompt, ([7, 2], True), tool, ([10, 11, 4], True)),
            trajectory(prompt, ([7, 2], True), tool, ([13], True)),
            trajectory(prompt, ([7, 2], True), tool, ([10, 11, 3], True)),
            trajectory(prompt, ([7, 2], True)),
        ],
        pad_token_id=PAD,
    )


def cut(batch: RolloutBatch, *, max_tokens: int = 10_000, layout: Layout = "tree") -> list[MicroBatch]:
    rows = torch.arange(len(batch))
    return list(micro_batches(batch, rows=rows, max_tokens=max_tokens, device=CPU, layout=layout))


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


@pytest.mark.parametrize("kind", CONFIGS)
@examples(6, derandomize=True)
@given(seed=st.integers(0, 10_000), num_rows=st.integers(1, 12), max_tokens=st.sampled_from([1, 60, 10_000]))
def test_a_tree_has_the_gradient_of_single_rows(kind: str, seed: int, num_rows: int, max_tokens: int) -> None:
    batch = tree_batch(Random(seed), num_rows=num_rows, longest=25)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    model.set_attn_implementation("sdpa")
    expected_logprobs, expected_entropy, expected = learn(model, batch, cut(batch, layout="alone"))
    use_tree_attention(model)
    logprobs, entropy, found = learn(model, batch, cut(batch, max_tokens=max_tokens))
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_shared_prefix_is_computed_once() -> None:
    [part] = cut(forked_batch())
    layout, before_M = as_tree(part)
    # 10 tokens of the longest row. Of the other rows the tokens after their forks: a 4, a 13, a 12 and nothing.
    assert layout.num_tokens == 13
    after = layout.input_ids_T[before_M]
    assert sorted(after.tolist()) == sorted([6, 7, 9, 10, 11] * 3 + [6] + [6, 7, 9] + [6, 7])


def test_the_attention_of_trees_computes_padded_rows_as_before() -> None:
    model, batch = tiny_policy(), forked_batch()
    [padded] = cut(batch, layout="padded")
    before = response_logprobs(model, padded, temperature=1.0)
    use_tree_attention(model)
    after = response_logprobs(model, padded, temperature=1.0)
    assert torch.equal(before.sampled_BR, after.sampled_BR)
