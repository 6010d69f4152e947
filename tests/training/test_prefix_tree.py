"""A prefix tree has each distinct token once, its attention equals that of single rows, and cuts repeat little."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agent_loop.training.prefix_tree import attention
from agent_loop.training.prefix_tree.layout import TreeLayout, lay_out
from agent_loop.training.prefix_tree.tree import SortedRows
from tests.harness import examples
from tests.training.trees import random_tree

CPU = torch.device("cpu")


def arrays(rows: Sequence[Sequence[int]]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    return [np.array(row, dtype=np.int64) for row in rows]


def prefixes(rows: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}


def caterpillar(num_tokens: int) -> list[list[int]]:
    """Return a row, and one that branches off after each of its tokens."""
    spine = [1] * num_tokens
    return [spine, *([1] * end + [2] for end in range(1, num_tokens))]


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


def random_heads(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return a query of four heads, and keys and values of two; values are shorter."""
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn((1, heads, num_tokens, size), generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads, size in ((4, 8), (2, 8), (2, 6))
    ]


@examples(60)
@given(trees())
def test_each_distinct_token_is_in_the_layout_once(rows: list[list[int]]) -> None:
    layout = lay_out(arrays(rows), device=CPU)

    assert layout.num_tokens == len(prefixes(rows))
    for row, places in zip(rows, layout.places, strict=True):
        assert layout.input_ids_T[places].tolist() == row
        assert layout.depth_T[places].tolist() == list(range(len(row)))


@examples(40)
@given(trees(), st.sampled_from([None, 1, 3, 40]))
def test_attention_over_a_tree_equals_attention_with_a_dense_mask(
    rows: list[list[int]], window: int | None
) -> None:
    layout = lay_out(arrays(rows), device=CPU)
    heads = random_heads(layout.num_tokens)
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


def test_tensors_whose_numbers_are_not_adjacent_are_copied() -> None:
    layout = lay_out(arrays(caterpillar(40)), device=CPU)
    spread = [each.detach().mT.contiguous().mT.requires_grad_() for each in random_heads(layout.num_tokens)]
    found = attention._blockwise(*spread, layout=layout, window=None, scale=0.3)
    expected = attend_densely(*spread, layout, None)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), spread), torch.autograd.grad(expected.sum(), spread), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@examples(60)
@given(trees(), st.integers(1, 200), st.integers(1, 4))
def test_runs_hold_every_row_once_and_keep_to_the_budget(
    rows: list[list[int]], max_tokens: int, number: int
) -> None:
    sorted_rows = SortedRows(dict(enumerate(arrays(rows))))
    assert sorted_rows.num_distinct == len(prefixes(rows))

    runs = sorted_rows.divided(max_tokens=max_tokens)

    assert sorted(row for run in runs for row in run) == list(range(len(rows)))
    for run in runs:
        assert len(prefixes([rows[row] for row in run])) <= max_tokens or len(run) == 1
    shares = sorted_rows.shares(number)
    assert len(shares) <= number
    assert sorted(row for share in shares for row in share) == list(range(len(rows)))
