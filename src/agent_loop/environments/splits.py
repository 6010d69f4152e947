"""Splits of rows that cannot overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

from agent_loop.errors import DataError

Split: TypeAlias = Literal["train", "val"]
VAL_SHARE = 10
"""One in so many tasks belongs to `val`, all others to `train`."""
MAX_SEARCHED = 100
"""Generated rows that are searched for each row of a split."""


def split_of(identity: str) -> Split:
    """Return the split of a task. It depends on its identity alone, so a repeated task is always in the same split."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return "val" if int.from_bytes(digest[:8]) % VAL_SHARE == 0 else "train"


def select_rows(
    rows: Iterable[dict[str, Any]],
    *,
    split: Split | None,
    identity: Callable[[dict[str, Any]], str],
    size: int | None,
    where: str,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split.

    Args:
        rows: All rows. They need not end if there is a size.
        split: The split. None selects all rows.
        identity: Returns text that two rows share only if they are the same task.
        size: Number of rows to yield, if there are as many. None yields all.
        where: Name of the rows in errors.

    Raises:
        DataError: The split has no rows, or too few among `MAX_SEARCHED` rows for each.
    """
    num_selected = num_searched = 0
    most = None if size is None else MAX_SEARCHED * size + 1000
    for row in rows:
        num_searched += 1
        if split is None or split_of(identity(row)) == split:
            num_selected += 1
            yield row
        if num_selected == size:
            return
        if num_searched == most:
            raise DataError(
                f"{where}: only {num_selected} of {num_searched} generated rows belong to split={split}, and "
                f"size is {size}; the generator repeats its tasks, so lower size or leave out split"
            )
    if not num_selected and split is not None:
        raise DataError(f"{where}: none of its {num_searched} rows belongs to split={split}; leave out split")
