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
        self._lengths = [len(tokens) for _, tokens in items]
        shared = [0, *(common_prefix(left, right) for (_, left), (_, right) in pairwise(items))]
        self._added = [length - common for length, common in zip(self._lengths, shared, strict=False)]

    @property
    def num_distinct(self) -> int:
        """Number of distinct tokens of all rows."""
        return sum(self._added)

    def divided(self, *, max_tokens: int) -> list[tuple[int, ...]]:
        """Divide the rows into as few runs as possible of at most `max_tokens` distinct tokens, or of one longer row.

        A run repeats the tokens that its first row shares with the row before.
        """
        return self._runs(self._filled_starts(max_tokens))

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

    def _filled_starts(self, max_tokens: int) -> list[int]:
        """Return the starts of runs that are as long as possible, which are the fewest runs."""
        starts: list[int] = []
        num_tokens = 0
        for row, (length, added) in enumerate(zip(self._lengths, self._added, strict=True)):
            num_tokens += added
            if not starts or num_tokens > max_tokens:
                starts.append(row)
                num_tokens = length
        return starts
