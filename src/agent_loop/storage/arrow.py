"""Modules of pyarrow, which has no type hints."""

from __future__ import annotations

from importlib import import_module
from typing import Any

pa: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")
compute: Any = import_module("pyarrow.compute")


def mask_of_rows(table: Any, **wanted: Any) -> Any:
    """Return a mask of the table's rows whose columns have these values. None matches every value."""
    mask: Any = pa.array([True] * table.num_rows, pa.bool_())
    for name, value in wanted.items():
        if value is not None:
            mask = compute.and_(mask, compute.equal(table[name], value))
    return mask
