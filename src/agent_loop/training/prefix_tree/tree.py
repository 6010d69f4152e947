"""The prefix tree of rows of tokens, and the division of rows by a token budget. N rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

LongArray: TypeAlias = NDArray[np.int64]
NO_TOKENS: LongArray = np.empty(0, dtype=np.int64)
PASS_COST = 512
"""Cost of one more pass, in tokens. More padding or repetition than this costs more than the pass that it saves."""


@dataclass(slots=True, eq=False)
class Node:
    """Run of tokens without a branch. A node below the root has no child or at least two."""

    tokens: LongArray
    depth: int
    """Number of tokens before the node."""
    children: dict[int, Node] = field(default_factory=dict[int, "Node"])
    """Children by their first token."""
    size: int = 0
    """Number of tokens of the node and of everything below it."""
    place: int = 0
    """Position of the first token in depth-first order."""

    @property
    def place_end(self) -> int:
        return self.place + len(self.tokens)

    @property
    def subtree_end(self) -> int:
        return self.place + self.size

    def heaviest_first(self) -> list[Node]:
        """Return the children, those with the most tokens first."""
        return sorted(self.children.values(), key=lambda child: -child.size)


def build_tree(rows: Sequence[LongArray]) -> Node:
    """Return the root of the prefix tree of the rows. The root has no tokens.

    In depth-first order, the heaviest child comes directly after its parent. The heaviest children from a node down to
    a leaf are therefore one contiguous path, and each token has at most log2(tokens) paths above its own.
    """
    root = Node(NO_TOKENS, depth=0)
    for tokens in sorted(rows, key=len, reverse=True):  # a prefix of another row then never makes a node
        _insert(root, tokens)
    order = list(_breadth_first(root))
    for node in reversed(order):
        node.size = len(node.tokens) + sum(child.size for child in node.children.values())
    pending, place = [root], 0
    while pending:
        node = pending.pop()
        node.place = place
        place += len(node.tokens)
        pending.extend(reversed(node.heaviest_first()))
    return root


def nodes_of_row(root: Node, tokens: LongArray) -> Iterator[tuple[Node, int]]:
    """Yield the nodes that hold a row of the tree, from the root down, and the number of tokens in each."""
    node, depth = root, 0
    while depth < len(tokens):
        node = node.children[int(tokens[depth])]
        yield node, min(len(node.tokens), len(tokens) - depth)
        depth += len(node.tokens)


def common_prefix(left: LongArray, right: LongArray) -> int:
    """Return the length of the common prefix."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _insert(root: Node, tokens: LongArray) -> None:
    node, depth = root, 0
    while depth < len(tokens):
        first = int(tokens[depth])
        child = node.children.get(first)
        if child is None:
            node.children[first] = Node(tokens[depth:], depth)
            return
        shared = common_prefix(child.tokens, tokens[depth:])
        depth += shared
        if shared < len(child.tokens) and depth < len(tokens):
            _split(child, shared)
        node = child


def _split(node: Node, length: int) -> None:
    """Move all tokens of a node but the first `length` to a new child."""
    below = Node(node.tokens[length:], node.depth + length, node.children)
    node.tokens, node.children = node.tokens[:length], {int(below.tokens[0]): below}


def _breadth_first(root: Node) -> Iterator[Node]:
    level = [root]
    while level:
        yield from level
        level = [child for node in level for child in node.children.values()]


class SortedRows:
    """Rows sorted by their tokens, so that rows with a common prefix are next to each other."""

    def __init__(self, tokens_of_rows: Mapping[int, LongArray]) -> None:
        """Sort rows."""
        # The bytes of big-endian numbers sort like the numbers.
        items = sorted(tokens_of_rows.items(), key=lambda item: item[1].astype(">u4").tobytes())
        self.rows: tuple[int, ...] = tuple(row for row, _ in items)
        """Indices of the rows, in the order of their tokens."""
        self._lengths_N: LongArray = np.array([len(tokens) for _, tokens in items], dtype=np.int64)
        shared = [common_prefix(left, right) for (_, left), (_, right) in pairwise(items)]
        self._added_N: LongArray = self._lengths_N - np.array([0, *shared][: len(items)], dtype=np.int64)
        self._ends_N: LongArray = self._added_N.cumsum()

    @property
    def num_distinct(self) -> int:
        """Number of distinct tokens of all rows."""
        return int(self._added_N.sum())

    def divided(self, *, max_tokens: int) -> list[tuple[int, ...]]:
        """Divide the rows into runs of at most `max_tokens` distinct tokens, or of one row that is longer.

        A run repeats the tokens that its first row shares with the row before. The cuts are those with the fewest
        repeated tokens, where each run costs `PASS_COST` tokens.
        """
        num_rows, lowest = len(self.rows), 0
        costs = np.zeros(num_rows + 1, dtype=np.int64)
        last_starts = np.zeros(num_rows + 1, dtype=np.int64)
        for end in range(1, num_rows + 1):  # of the last run, by dynamic programming
            starts = np.arange(lowest, end)
            sizes = self._num_tokens(starts, end)
            # An earlier start never has fewer tokens, so that a start that is too early stays so.
            num_too_early = min(int((sizes > max_tokens).sum()), len(starts) - 1)
            lowest += num_too_early
            totals = (costs[starts] + sizes)[num_too_early:]
            last_starts[end] = lowest + int(totals.argmin())
            costs[end] = totals.min() + PASS_COST
        starts_found: list[int] = []
        end = num_rows
        while end:
            end = int(last_starts[end])
            starts_found.append(end)
        return self._runs(starts_found[::-1])

    def shares(self, number: int) -> list[tuple[int, ...]]:
        """Divide the rows into at most `number` runs whose largest has as few distinct tokens as possible."""
        lowest, highest = 1, max(1, self.num_distinct)
        while lowest < highest:
            middle = (lowest + highest) // 2
            is_enough = len(self._filled_starts(middle)) <= number
            lowest, highest = (lowest, middle) if is_enough else (middle + 1, highest)
        return self._runs(self._filled_starts(lowest))

    def _runs(self, starts: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.rows[start:end] for start, end in pairwise((*starts, len(self.rows)))]

    def _num_tokens(self, starts: LongArray, end: int) -> LongArray:
        """Return the number of distinct tokens of the runs from each start to `end`, which is excluded."""
        return self._lengths_N[starts] + self._ends_N[end - 1] - self._ends_N[starts]

    def _filled_starts(self, max_tokens: int) -> list[int]:
        """Return the starts of runs that are as long as possible, which are the fewest runs."""
        starts: list[int] = []
        for row in range(len(self.rows)):
            if not starts or int(self._num_tokens(np.array([starts[-1]]), row + 1)[0]) > max_tokens:
                starts.append(row)
        return starts
