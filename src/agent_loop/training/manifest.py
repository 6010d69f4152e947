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


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and checksum of a file when it was written."""

    size: int
    crc32: int | None
    """None in checkpoints of versions that stored only sizes."""


Manifest = Mapping[str, FileFacts]
"""Facts by path, relative to the folder, with `/`."""


def manifest_of(folder: Path) -> dict[str, FileFacts]:
    """Return the facts of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        facts = threads.map(_facts, files)
        return {path.relative_to(folder).as_posix(): each for path, each in zip(files, facts, strict=True)}


def manifest_form(manifest: Manifest) -> dict[str, Any]:
    """Return plain values for a JSON file."""
    return {name: asdict(facts) for name, facts in manifest.items()}


def read_manifest(form: object) -> dict[str, FileFacts]:
    """Return the manifest from which `manifest_form` made these values. A number in place of facts is a size."""
    if not isinstance(form, dict):
        raise ValueError(f"the list of files is a {type(form).__name__}")
    return {_name(name): _read_facts(facts) for name, facts in cast(dict[str, Any], form).items()}


def find_damage(folder: Path, manifest: Manifest, *, parts: Iterable[str] | None = None) -> str | None:
    """Return the first file that differs from the manifest, and how; None if all files are equal.

    Args:
        folder: Folder of the files.
        manifest: Facts of the files when they were written.
        parts: Check only these subfolders; None checks all that the manifest names.
    """
    wanted = set(parts) if parts is not None else {name.partition("/")[0] for name in manifest}
    names = [name for name in manifest if name.partition("/")[0] in wanted]
    for name in names:
        file = folder / name
        try:
            size = file.stat().st_size if file.is_file() else None
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if size is None:
            return f"{name} is missing"
        if size != manifest[name].size:
            return f"{name} has {size} bytes instead of {manifest[name].size}"
    summed = [name for name in names if manifest[name].crc32 is not None]
    for part in sorted(wanted) if summed else ():
        for file in sorted((folder / part).rglob("*")):
            name = file.relative_to(folder).as_posix()
            if file.is_file() and name not in manifest:
                return f"{name} was not written with it"
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        found = threads.map(
            _compared, [folder / name for name in summed], [manifest[name] for name in summed]
        )
        for name, complaint in zip(summed, found, strict=True):
            if complaint is not None:
                return f"{name} {complaint}"
    return None


def crc32_of(file: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _facts(file: Path) -> FileFacts:
    return FileFacts(size=file.stat().st_size, crc32=crc32_of(file))


def _compared(file: Path, facts: FileFacts) -> str | None:
    try:
        return None if crc32_of(file) == facts.crc32 else "is not what was written (its checksum differs)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _read_facts(form: object) -> FileFacts:
    if isinstance(form, int):
        return FileFacts(size=form, crc32=None)
    facts = FileFacts(**cast(dict[str, Any], form))
    if not isinstance(cast(Any, facts.size), int) or not isinstance(cast(Any, facts.crc32), int):
        raise ValueError("a size or checksum is not a whole number")
    return facts


def _name(name: str) -> str:
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is not in the folder")
    return name


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
