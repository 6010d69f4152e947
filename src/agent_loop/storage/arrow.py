"""pyarrow, which says nothing of its types."""

from __future__ import annotations

from importlib import import_module
from typing import Any

pa: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")
compute: Any = import_module("pyarrow.compute")


def mask_of_rows(table: Any, **wanted: Any) -> Any:
    """The rows of a table whose columns have these values; None is any."""
    mask: Any = pa.array([True] * table.num_rows, pa.bool_())
    for name, value in wanted.items():
        if value is not None:
            mask = compute.and_(mask, compute.equal(table[name], value))
    return mask
