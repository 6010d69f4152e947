"""Layout of a prefix tree in one line of tokens, and the blocks of its attention.

The line is in depth-first order, where the heaviest child comes first. A token at position k is visible to those at k
to `end_T[k] - 1`: to the rest of its node and to everything below. A heaviest path from a node down is contiguous.
Attention is therefore causal within each path, and whole where the subtrees beside a path attend to a prefix of the
path. Subtrees of a few tokens are computed together with small masks. T tokens of the line, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from agent_loop.training.prefix_tree.tree import LongArray, Node, build_tree, nodes_of_row

TILE = 64
"""Largest number of tokens of small subtrees that are computed together with a mask."""
PIECE = 128
"""Largest number of queries in a block at the edge of a sliding window."""
HIDDEN = -1e30
"""Score of a pair that is not visible. Finite, so that a query without a visible key has no NaN."""


@dataclass(frozen=True, slots=True)
class Block:
    """Attention of a run of queries over a run of keys."""

    queries: slice
    keys: slice
    is_causal: bool = False
    is_masked: bool = False
    """Some pairs are not visible."""
    mask: Tensor | None = None
    """Mask that is added to the scores, [1, 1, queries, keys]."""

    @property
    def is_own(self) -> bool:
        """Whether the queries are the keys. Each token is in one such block. Others have keys above the queries."""
        return self.queries == self.keys


Blocks: TypeAlias = tuple[Block, ...]
"""Blocks that cover all visible pairs of a tree."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """Rows as a prefix tree in one line. A model gets the layout as an argument, for its attention."""

    input_ids_T: Tensor
    depth_T: Tensor
    """Position of each token in its row, from 0."""
    end_T: Tensor
    """Position in the line after the last token to which a token is visible."""
    places: tuple[LongArray, ...]
    """For each row, the positions of its tokens."""
    blocks: Blocks
    """Blocks of a layer without a window. Their masks are not made yet."""
    masked: dict[int | None, Blocks] = field(default_factory=dict[int | None, Blocks])
    """Blocks with masks, by the length of a sliding window in tokens, so that layers share them."""
    flex_masks: dict[int | None, Any] = field(default_factory=dict[int | None, Any])
    """Masks of FlexAttention, likewise."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    def blocks_for(self, window: int | None) -> Blocks:
        """Return the blocks of a layer with a sliding window of so many tokens, or without one."""
        if window not in self.masked:
            depth_T = cast(LongArray, self.depth_T.cpu().numpy())
            blocks = self.blocks
            if window is not None and window <= int(depth_T.max()):
                blocks = tuple(_within_window(blocks, depth_T, window))
            self.masked[window] = _with_masks(blocks, self.depth_T, self.end_T, window=window)
        return self.masked[window]


def lay_out(rows: Sequence[LongArray], *, device: torch.device) -> TreeLayout:
    """Return the layout of rows of token ids, none of which is empty."""
    root = build_tree(rows)
    ids_T, depth_T, end_T = (np.zeros(root.size, dtype=np.int64) for _ in range(3))
    pending = [root]
    while pending:
        node = pending.pop()
        run = slice(node.place, node.place_end)
        ids_T[run], end_T[run] = node.tokens, node.subtree_end
        depth_T[run] = np.arange(node.depth, node.depth + len(node.tokens))
        pending.extend(node.children.values())
    as_tensor: Any = cast(Any, torch).from_numpy
    depth, end = as_tensor(depth_T).to(device), as_tensor(end_T).to(device)
    places = tuple(
        np.concatenate([np.arange(node.place, node.place + count) for node, count in nodes_of_row(root, row)])
        for row in rows
    )
    return TreeLayout(as_tensor(ids_T).to(device), depth, end, places, tuple(_blocks(root)))


def _blocks(root: Node) -> Iterator[Block]:
    pending = [root]
    for node in iter(lambda: pending.pop() if pending else None, None):
        if node.size <= TILE and node.children:
            yield _on_itself(node.place, node.subtree_end, is_causal=False)
            continue
        path, beside = _path(node)
        yield _on_itself(node.place, path.stop, is_causal=True)
        yield from _over_prefixes(path, beside)
        for group in _small_groups(beside):
            if len(group) == 1:
                pending.append(group[0][0])
            else:
                yield _on_itself(group[0][0].place, group[-1][0].subtree_end, is_causal=False)


def _on_itself(start: int, end: int, *, is_causal: bool) -> Block:
    run = slice(start, end)
    return Block(run, run, is_causal=is_causal, is_masked=not is_causal)


def _path(head: Node) -> tuple[slice, list[tuple[Node, int]]]:
    """Return the heaviest path from a node down, and the subtrees beside it in the order of the line.

    With each subtree comes the end of the keys on the path that it attends to.
    """
    beside: list[tuple[Node, int]] = []
    node = head
    while node.children:
        heaviest, *others = node.heaviest_first()
        beside += [(other, node.place_end) for other in reversed(others)]
        node = heaviest
    return slice(head.place, node.place_end), beside[::-1]


def _over_prefixes(path: slice, beside: Sequence[tuple[Node, int]]) -> Iterator[Block]:
    """Yield the blocks in which the subtrees beside a path attend to prefixes of the path.

    One block serves all subtrees that branch off at the same token, and those that branch off at nearby tokens as far
    as the mask remains small.
    """
    group: list[tuple[Node, int]] = []
    for subtree, end in beside:
        queries = slice(group[0][0].place if group else 0, subtree.subtree_end)
        num_masked = (group[0][1] - end) * (queries.stop - queries.start) if group else 0
        if num_masked > TILE * TILE:
            yield from _over_prefix(path.start, group)
            group = []
        group.append((subtree, end))
    if group:
        yield from _over_prefix(path.start, group)


def _over_prefix(start: int, group: Sequence[tuple[Node, int]]) -> Iterator[Block]:
    queries = slice(group[0][0].place, group[-1][0].subtree_end)
    first_end, last_end = group[-1][1], group[0][1]
    if start < first_end:
        yield Block(queries, slice(start, first_end))
    if first_end < last_end:
        yield Block(queries, slice(first_end, last_end), is_masked=True)


def _small_groups(beside: Sequence[tuple[Node, int]]) -> Iterator[list[tuple[Node, int]]]:
    """Yield the subtrees in groups of at most `TILE` tokens, or of one subtree."""
    group: list[tuple[Node, int]] = []
    num_tokens = 0
    for item in beside:
        if group and num_tokens + item[0].size > TILE:
            yield group
            group, num_tokens = [], 0
        group.append(item)
        num_tokens += item[0].size
    if group:
        yield group


def _within_window(blocks: Blocks, depth_T: LongArray, window: int) -> Iterator[Block]:
    """Yield blocks in pieces whose pairs are within a sliding window, or that need a small mask."""
    for block in blocks:
        is_inside = depth_T[block.queries].max() - depth_T[block.keys].min() < window
        if (block.is_own and block.is_masked) or is_inside:
            yield block
            continue
        for first in range(block.queries.start, block.queries.stop, PIECE):
            queries, above = slice(first, min(first + PIECE, block.queries.stop)), block
            if block.is_own:
                yield _on_itself(first, queries.stop, is_causal=queries.stop - first <= window)
                above = Block(queries, slice(block.keys.start, first))
            yield from _keys_within(replace(above, queries=queries), depth_T, window)


def _keys_within(block: Block, depth_T: LongArray, window: int) -> Iterator[Block]:
    """Yield the parts of a block with keys of a path that some queries see, and that all queries see."""
    keys, depths = block.keys, depth_T[block.queries]
    if keys.start == keys.stop:
        return
    # Position of the first key that a query at depth 0 would see, if the path went on upwards.
    origin = keys.start - int(depth_T[keys.start]) - window + 1
    seen = max(keys.start, origin + int(depths.min()))
    full = keys.stop if block.is_masked else min(keys.stop, max(seen, origin + int(depths.max())))
    if seen < full:
        yield replace(block, keys=slice(seen, full), is_masked=True)
    if full < keys.stop and seen < keys.stop:
        yield replace(block, keys=slice(full, keys.stop))


def _with_masks(blocks: Blocks, depth_T: Tensor, end_T: Tensor, *, window: int | None) -> Blocks:
    lowest_T = lowest_visible(depth_T, window)

    def with_mask(block: Block) -> Block:
        if not block.is_masked:
            return block
        positions = torch.arange(len(depth_T), device=depth_T.device)
        queries, keys = positions[block.queries, None], positions[block.keys]
        visible = is_visible(queries, keys, depth_T=depth_T, end_T=end_T, lowest_T=lowest_T)
        mask = torch.zeros(visible.shape, device=depth_T.device).masked_fill_(~visible, HIDDEN)
        return replace(block, mask=mask[None, None])

    return tuple(map(with_mask, blocks))


def lowest_visible(depth_T: Tensor, window: int | None) -> Tensor | None:
    """Return the lowest depth that each token attends to in a sliding window; None without a window.

    It is a tensor, because the masks of FlexAttention cannot be compiled with a number that differs from call to call.
    """
    return None if window is None else depth_T - (window - 1)


def is_visible(
    queries: Tensor, keys: Tensor, *, depth_T: Tensor, end_T: Tensor, lowest_T: Tensor | None
) -> Tensor:
    """Return whether queries attend to keys, for positions that broadcast."""
    is_below = (keys <= queries) & (queries < end_T[keys])
    return is_below if lowest_T is None else is_below & (depth_T[keys] >= lowest_T[queries])
