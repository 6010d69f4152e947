"""The columns of a shard, which those of the other shards of a source must match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_loop.errors import DataError
from agent_loop.rollout.row_sources import Shard

_NUMBER_IN_JSON = {"int": "number", "float": "number"}


@dataclass(slots=True)
class ShardColumns:
    """The columns of one shard, and the types of their values. What is nested in the values does not count."""

    shard: Shard
    types: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By column; empty for a column that holds only nulls."""

    def add(self, row: Mapping[Any, Any]) -> None:
        """Take the next row."""
        for name, value in row.items():
            types = self.types.setdefault(str(name), set())
            if value is not None:
                types.add(type(value).__name__)

    def refuse_others_than(self, first: ShardColumns) -> None:
        """Refuse the shard if its columns are not those of another shard.

        Raises:
            DataError: A column is missing, new, or of another type.
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
                f"the columns of {where} are not those of {other}: it {' and '.join(faults)}; give all files of a "
                "source the same columns, or name the files as sources of their own"
            )
        for name in sorted(self.types):
            mine, its = self._types_of(name), first._types_of(name)
            if mine and its and not mine & its:
                raise DataError(
                    f"the column {name!r} of {where} holds {_joined(mine)}, but {_joined(its)} in {other}; give all "
                    "files of a source the same types, or name the files as sources of their own"
                )

    def _types_of(self, name: str) -> set[str]:
        if self.shard.suffix not in (".json", ".jsonl"):
            return self.types[name]
        return {_NUMBER_IN_JSON.get(each, each) for each in self.types[name]}


def _joined(types: set[str]) -> str:
    return " and ".join(sorted(types))
