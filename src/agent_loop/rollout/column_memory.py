"""Where the columns of batches lie, so that making them asks the system for as little memory as possible.

New memory is dear: the system fills each of its pages with zeros when it is first touched, which takes longer than all
else that is done for a batch (2 ms for 5 MB, on a virtual machine).
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Shape: TypeAlias = tuple[int, int]

MIN_BYTES = 2**20
"""Smaller columns come from memory that the process has already."""
MAX_KEPT_BYTES = 2**28
"""Of memory for later columns."""
MAX_SPARSE_SHARE = 0.25
"""A column of which more is written to gains by memory that is there already."""
MAX_UNUSED_SHARE = 0.25
"""So much of a block may be more than a column needs."""


class ColumnMemory:
    """Blocks of memory that columns lie in. One that nothing refers to any more is used for the next column. Threads
    may share it.

    Args:
        max_kept_bytes: Blocks beyond that are left to those who use them.
    """

    def __init__(self, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._blocks: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    @property
    def num_kept_bytes(self) -> int:
        """Of all blocks, those in use included."""
        return sum(block.nbytes for block in self._blocks)

    def filled(self, shape: Shape, dtype: Any, fill: float) -> NDArray[Any]:
        """A column that holds one number."""
        if _num_bytes(shape, dtype) < MIN_BYTES:
            return np.full(shape, fill, dtype)
        column = self._column(shape, np.dtype(dtype))
        column.fill(fill)
        return column

    def zeros(self, shape: Shape, dtype: Any, *, num_written: int) -> NDArray[Any]:
        """A column of zeros, so many of which will be written to. If they are few, the others take neither time nor
        memory. numpy's do, from 4 MiB on: it asks for huge pages, each of which is filled as a whole."""
        num_bytes = _num_bytes(shape, dtype)
        if num_bytes < MIN_BYTES:
            return np.zeros(shape, dtype)
        if num_written > MAX_SPARSE_SHARE * math.prod(shape):
            return self.filled(shape, dtype, 0)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(memory, dtype).reshape(shape)

    def _column(self, shape: Shape, dtype: np.dtype[Any]) -> NDArray[Any]:
        """With anything in it."""
        num_bytes = _num_bytes(shape, dtype)
        with self._lock:
            block = self._free_block(num_bytes)
            if block is None:
                block = np.empty(num_bytes, np.uint8)
                self._keep(block)
            return block[:num_bytes].view(dtype).reshape(shape)

    def _free_block(self, num_bytes: int) -> NDArray[np.uint8] | None:
        for block in self._blocks:
            fits = num_bytes <= block.nbytes <= num_bytes / (1 - MAX_UNUSED_SHARE)
            # Whatever shows a part of a block refers to it: nothing but the list, this name and the call does.
            if fits and sys.getrefcount(block) <= 3:
                return block
        return None

    def _keep(self, block: NDArray[np.uint8]) -> None:
        """Forgets the oldest blocks for it."""
        self._blocks.append(block)
        while self.num_kept_bytes > self._max_kept_bytes:
            self._blocks.pop(0)


def _num_bytes(shape: Shape, dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize
