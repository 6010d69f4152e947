"""Digests of the files of a run's rows, with which a resume detects changed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from agent_loop.recording.values import digest
from agent_loop.rollout.rows import RowFile

_MAX_NAMED = 5
"""Number of changes that an error names."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """File of rows, or function, as it was when a run read it."""

    name: str
    num_bytes: int | None
    """None for a function."""
    num_rows: int
    digest: str
    """Digest of the rows in order. Values that JSON cannot represent count by their type."""

    @property
    def size(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        return rows + ("" if self.num_bytes is None else f", {self.num_bytes} bytes")


@dataclass(frozen=True, slots=True)
class DataManifest:
    """Files of a data set, in order."""

    files: tuple[DataFile, ...]
    digest: str
    """Digest of all rows in order, independent of their division into files."""

    @classmethod
    def of(cls, files: Sequence[RowFile]) -> DataManifest:
        """Return the manifest of files that were read."""
        by_file = [[digest(row) for row in file.rows] for file in files]
        described = (
            DataFile(file.name, file.num_bytes, len(digests), digest(digests))
            for file, digests in zip(files, by_file, strict=True)
        )
        return cls(tuple(described), digest([each for digests in by_file for each in digests]))

    @classmethod
    def read(cls, form: object) -> DataManifest:
        """Return the manifest whose `form` returned these values.

        Raises:
            LookupError, TypeError, ValueError: The values are not those of a manifest.
        """
        values = cast(Mapping[str, Any], form)
        return cls(tuple(DataFile(**each) for each in values["files"]), str(values["digest"]))

    def form(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return asdict(self)

    def changes_since(self, before: DataManifest) -> str | None:
        """Return which files have changed, and how; None if the rows are the same.

        Files with other names or sizes but the same rows, such as compressed files, have not changed.
        """
        if self.digest == before.digest:
            return None
        old, new = {file.name: file for file in before.files}, {file.name: file for file in self.files}
        kept = {file.digest for file in self.files} & {file.digest for file in before.files}
        changes = [
            *(
                f"added: {f.name} ({f.size})"
                for f in self.files
                if f.name not in old and f.digest not in kept
            ),
            *(
                f"removed: {f.name} ({f.size})"
                for f in before.files
                if f.name not in new and f.digest not in kept
            ),
            *(
                f"changed: {name} (was {old[name].size}; is {new[name].size})"
                for name in old.keys() & new.keys()
                if old[name].digest != new[name].digest
            ),
        ]
        if not changes:
            return "the files come in another order, or another number of times"
        more = f"; and {len(changes) - _MAX_NAMED} more" if len(changes) > _MAX_NAMED else ""
        return "; ".join(sorted(changes)[:_MAX_NAMED]) + more
