"""Parquet files of trajectories: the library that reads them, and their metadata."""

from __future__ import annotations

from dataclasses import dataclass
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


SCHEMA_VERSION = "1"
"""Version that changes when a column changes its meaning or is removed, but not when columns are added."""
ROWS_PER_GROUP = 64
"""Maximum rows of a row group, which is the unit of reading."""
VOCABULARY_VERSION = 1
VOCABULARY_FILE = "vocabulary.json"


@dataclass(frozen=True, slots=True)
class Metadata:
    """Keys of a file's metadata. All values are text."""

    schema_version: str = "agent_loop.schema_version"
    step: str = "agent_loop.step"
    split: str = "agent_loop.split"
    success_threshold: str = "agent_loop.success_threshold"


METADATA = Metadata()
