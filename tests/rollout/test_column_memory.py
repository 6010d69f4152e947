"""Columns lie in memory that was used before, and never in memory that somebody still looks at."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agent_loop.rollout.column_memory import MIN_BYTES, ColumnMemory

ROWS = 64
WIDTH = MIN_BYTES // ROWS // 8
SHAPE = (ROWS, WIDTH)


def place(column: NDArray[Any]) -> int:
    return column.__array_interface__["data"][0]


def test_a_column_takes_the_memory_of_one_that_is_gone() -> None:
    memory = ColumnMemory()
    column = memory.filled(SHAPE, np.int64, 7)
    before = place(column)
    column[:] = 1
    del column
    column = memory.filled(SHAPE, np.int64, 9)
    assert place(column) == before
    assert (column == 9).all()
    assert memory.num_kept_bytes == MIN_BYTES


def tensor_of(column: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(column)  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda column: column[:, 5:], id="a view"),
        pytest.param(lambda column: next(iter(column)), id="a row"),
        pytest.param(tensor_of, id="a tensor"),
        pytest.param(lambda column: tensor_of(column)[3:, :9], id="a tensor's view"),
    ],
)
def test_memory_that_is_looked_at_stays_as_it_is(look: Callable[[NDArray[Any]], Any]) -> None:
    memory = ColumnMemory()
    left = look(memory.filled(SHAPE, np.int64, 7))
    memory.filled(SHAPE, np.int64, 9)
    memory.filled(SHAPE, np.int64, 9)
    assert (left == 7).all()


def test_a_column_fits_into_memory_that_is_a_little_larger() -> None:
    memory = ColumnMemory()
    before = place(memory.filled((ROWS, 2 * WIDTH), np.int64, 7))
    column = memory.filled((ROWS, 2 * WIDTH - WIDTH // 4), np.int64, 9)
    assert place(column) == before
    assert column.flags.c_contiguous
    del column
    much_smaller = memory.filled(SHAPE, np.int64, 9)
    assert place(much_smaller) != before


def test_the_same_memory_serves_columns_of_another_type() -> None:
    memory = ColumnMemory()
    before = place(memory.filled(SHAPE, np.int64, -1))
    column = memory.filled((ROWS, 2 * WIDTH), np.float32, 0.5)
    assert place(column) == before
    assert column.dtype == np.float32
    assert (column == 0.5).all()


def test_no_more_is_kept_than_allowed_and_users_keep_theirs() -> None:
    memory = ColumnMemory(max_kept_bytes=3 * MIN_BYTES)
    columns = [memory.filled(SHAPE, np.int64, number) for number in range(10)]
    assert memory.num_kept_bytes == 3 * MIN_BYTES
    assert all((column == number).all() for number, column in enumerate(columns))
    huge = memory.filled((ROWS, 8 * WIDTH), np.int64, 5)
    assert memory.num_kept_bytes <= 3 * MIN_BYTES
    assert (huge == 5).all()


@pytest.mark.parametrize("num_written", [0, ROWS * WIDTH])
@pytest.mark.parametrize("width", [1, WIDTH, 2 * WIDTH])
def test_zeros_are_zeros_whatever_was_there_before(num_written: int, width: int) -> None:
    memory = ColumnMemory()
    memory.filled((ROWS, width), np.int64, 7)
    column = memory.zeros((ROWS, width), np.int64, num_written=num_written)
    assert not column.any()
    column += 1
    assert (column == 1).all()


def test_threads_never_get_the_same_memory() -> None:
    memory = ColumnMemory()

    def use(number: int) -> bool:
        column = memory.filled(SHAPE, np.int64, number)
        column += 1
        return bool((column == number + 1).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(400)))
    assert memory.num_kept_bytes <= 9 * MIN_BYTES
