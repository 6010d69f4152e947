"""Columns of a shard. All shards of a source must have the same columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_loop.errors import DataError
from agent_loop.rollout.row_sources import Shard

_NUMBER_IN_JSON = {"int": "number", "float": "number"}


@dataclass(slots=True)
class ShardColumns:
    """Columns of one shard, and the types of their values. Types of nested values are not compared."""

    shard: Shard
    types: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Names of types by column. The set is empty if all values of the column are null."""

    def add(self, row: Mapping[Any, Any]) -> None:
        """Add the columns and types of the next row."""
        for name, value in row.items():
            types = self.types.setdefault(str(name), set())
            if value is not None:
                types.add(type(value).__name__)

    def check_matches(self, first: ShardColumns) -> None:
        """Check that this shard has the same columns as the first shard.

        Raises:
            DataError: A column is missing, additional, or of another type.
        """
        where, other = str(self.shard.path), str(first.shard.path)
        missing, new = first.types.keys() - self.types.keys(), self.types.keys() - first.types.keys()
        if missing or new:
            faults = [
                f"{word} {', '.join(map(repr, sorted(names)))}"
                for word, names in (("lacks", missing), ("has", new))
                if names
            ]
            raise DataError(
                f"the columns of {where} differ from the columns of {other}: it {' and '.join(faults)}; give all files "
                "of a source the same columns, or list the files as separate sources"
            )
        for name in sorted(self.types):
            types, first_types = self._types_of(name), first._types_of(name)
            if types and first_types and not types & first_types:
                raise DataError(
                    f"the column {name!r} of {where} holds {_joined(types)}, but {_joined(first_types)} in {other}; "
                    "give all files of a source the same types, or list the files as separate sources"
                )

    def _types_of(self, name: str) -> set[str]:
        if self.shard.suffix not in (".json", ".jsonl"):
            return self.types[name]
        return {_NUMBER_IN_JSON.get(each, each) for each in self.types[name]}


def _joined(types: set[str]) -> str:
    return " and ".join(sorted(types))
