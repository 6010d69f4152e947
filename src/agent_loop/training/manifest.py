"""Digests of files: those of a checkpoint, which detect damage, and those of rows, which detect changes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from agent_loop.recording.values import digest
from agent_loop.rollout.rows import RowFile

CHUNK_BYTES = 4 << 20
MAX_THREADS = 8
"""Number of files that are read at once. Reading and checksums release the GIL."""
_MAX_NAMED = 5
"""Number of changes that an error names."""


def manifest_of(folder: Path) -> dict[str, dict[str, int]]:
    """Return the size and the CRC-32 of all files in a folder, by path relative to the folder, with `/`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        return {
            path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": crc32}
            for path, crc32 in zip(files, threads.map(_crc32_of, files), strict=True)
        }


def find_damage(
    folder: Path, manifest: Mapping[str, Mapping[str, int]], *, parts: Iterable[str] | None = None
) -> str | None:
    """Return the first file that differs from the manifest, and how; None if all files are equal.

    `parts` are the subfolders to check; None checks all that the manifest names.
    """
    wanted = set(parts) if parts is not None else {name.partition("/")[0] for name in manifest}
    names = [name for name in manifest if name.partition("/")[0] in wanted]
    for name in names:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != manifest[name]["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {manifest[name]['size']}"
    for file in (file for part in sorted(wanted) for file in sorted((folder / part).rglob("*"))):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name not in manifest:
            return f"{name} was not written with it"
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        for name, crc32 in zip(names, threads.map(_crc32_of, [folder / name for name in names]), strict=True):
            if crc32 != manifest[name]["crc32"]:
                return f"{name} is not what was written (its checksum differs)"
    return None


def _crc32_of(file: Path) -> int:
    crc = 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


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
        """Return the manifest whose `form` returned these values."""
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
