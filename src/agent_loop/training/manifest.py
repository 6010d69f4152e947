"""Digests of files: those of a checkpoint, which detect damage, and those of rows, which detect changes."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent_loop.recording.values import digest
from agent_loop.rollout.rows import RowFile

CHUNK_BYTES = 4 << 20
MAX_THREADS = 8
"""Number of files that are read at once. Reading and checksums release the GIL."""
_MAX_NAMED = 5
"""Number of changes that an error names."""


def manifest_of(folder: Path, *, parts: Collection[str] | None = None) -> dict[str, dict[str, int]]:
    """Return the size and the CRC-32 of all files in a folder, by path relative to the folder, with `/`.

    `parts` are the subfolders to read; None reads all files.
    """
    named = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    if parts is not None:
        named = {name: path for name, path in named.items() if _part_of(name) in parts}
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        return {
            name: {"size": path.stat().st_size, "crc32": crc32}
            for (name, path), crc32 in zip(named.items(), threads.map(_crc32_of, named.values()), strict=True)
        }


def find_damage(
    folder: Path, manifest: Mapping[str, Mapping[str, int]], *, parts: Collection[str] | None = None
) -> str | None:
    """Return the first file that differs from the manifest, and how; None if all files are equal.

    `parts` are the subfolders to check; None checks all that the manifest names.
    """
    parts = {_part_of(name) for name in manifest} if parts is None else parts
    expected = {name: facts for name, facts in manifest.items() if _part_of(name) in parts}
    found = manifest_of(folder, parts=parts)
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} was not written with it"
        if found[name]["size"] != expected[name]["size"]:
            return f"{name} has {found[name]['size']} bytes instead of {expected[name]['size']}"
        if found[name] != expected[name]:
            return f"{name} is not what was written (its checksum differs)"
    return None


def _part_of(name: str) -> str:
    return name.partition("/")[0]


def _crc32_of(file: Path) -> int:
    crc = 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


@dataclass(frozen=True, slots=True)
class DataManifest:
    """Files of a data set, as they were when a run read them."""

    files: Mapping[str, str]
    """Digest of the rows of each file or function, by name. Values that JSON cannot represent count by their type."""
    digest: str
    """Digest of all rows in order, independent of their division into files."""

    @classmethod
    def read(cls, files: Mapping[str, str] | list[dict[str, str]], digest: str) -> DataManifest:
        """Return the manifest of a checkpoint. Those of earlier versions list descriptions of the files."""
        return cls(
            {each["name"]: each["digest"] for each in files} if isinstance(files, list) else files, digest
        )

    @classmethod
    def of(cls, files: Sequence[RowFile]) -> DataManifest:
        """Return the manifest of files that were read."""
        by_file = [[digest(row) for row in file.rows] for file in files]
        named = {file.name: digest(digests) for file, digests in zip(files, by_file, strict=True)}
        return cls(named, digest([each for digests in by_file for each in digests]))

    def changes_since(self, before: DataManifest) -> str | None:
        """Return which files have changed; None if the rows are the same.

        Files with other names but the same rows, such as compressed files, have not changed.
        """
        if self.digest == before.digest:
            return None
        old, new = before.files, self.files
        changes = [
            f"{'added' if name not in old else 'changed' if name in new else 'removed'}: {name}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        more = f"; and {len(changes) - _MAX_NAMED} more" if len(changes) > _MAX_NAMED else ""
        return "; ".join(changes[:_MAX_NAMED]) + more or "the files come in another order or number"
