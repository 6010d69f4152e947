"""Find the files of a source of rows: a file, a glob, a folder of shards, or a folder saved by `datasets`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, cast

from agent_loop.errors import ConfigError, DataError, did_you_mean
from agent_loop.files.file_kinds import DATASET_DICT_FILE, SAVED_DATASET, STATE_FILE, explain, kind_of
from agent_loop.files.plain_values import parse_json

ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
COMPRESSIBLE = (".jsonl", ".json", ".csv")
"""Suffixes of files that may be compressed, as in `rows.jsonl.gz`."""
WANTED = ".jsonl, .json or .csv (also .gz), .parquet or .arrow"
_SPLIT_NAME = re.compile(r"(train|test|valid|validation|val|dev|eval)(?![a-zA-Z])")
_MAX_NAMED = 5
"""Number of files that an error names."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of rows."""

    path: Path
    suffix: str
    """Kind of the file: one of `ROW_SUFFIXES`."""
    may_be_empty: bool = False
    """Whether the file may hold no rows even if other files of its source do."""


def find_shards(source: str) -> list[Shard] | None:
    """Return the files that a source names, sorted by name. Return None if the source is not a path.

    Args:
        source: A file, a folder of shards, a glob (`**` matches any number of folders), or a folder saved by
            `datasets`, followed by `:` and a split if the folder has several.

    Raises:
        DataError: There is no such file, or the files are of several kinds or splits.
        ConfigError: The kind of the source is unknown.
    """
    path = Path(source)
    folder, colon, split = source.rpartition(":")
    if path.is_dir():
        return _saved_shards(path) if kind_of(path) is SAVED_DATASET else _shards_in(path)
    if path.is_file():
        return [_shard(path)]
    if "://" in source:
        raise ConfigError(f"data source {source!r} is a URL; download it, and give its files or folder")
    if colon and Path(folder).exists() and not _has_functions(Path(folder)):
        if kind_of(Path(folder)) is not SAVED_DATASET:
            raise DataError(
                f"data source {source!r} names a split of {folder!r}, which is not a folder saved by `datasets`; give "
                "the files of the split, as in folder/train-*.parquet"
            )
        return _saved_shards(Path(folder), split=split)
    if has_magic(source):
        return _matching(source)
    if _suffix(path) is not None:
        raise DataError(
            f"data file {source!r} does not exist{_nearest(path)}; give the path of a file with rows"
        )
    if colon:
        return None
    raise ConfigError(
        f"data source {source!r} is neither a folder nor a file of a known kind{_nearest(path)}; give a file "
        f"({WANTED}), a folder or a glob of such files, a folder saved by `datasets`, suite:task, or file.py:function"
    )


def _has_functions(path: Path) -> bool:
    """Return whether a path is a Python file or package."""
    return path.suffix == ".py" or (path / "__init__.py").is_file()


def _shard(path: Path) -> Shard:
    suffix = _suffix(path)
    if suffix is None:
        raise ConfigError(
            f"the kind of data file {str(path)!r} is unknown; give {WANTED}, or file.py:function"
        )
    return Shard(path, suffix)


def _suffix(path: Path) -> str | None:
    """Return the kind of a file, such as `.jsonl` for `rows.jsonl.gz`. Return None if its name is not one of rows."""
    if path.suffix == ".gz":
        inner = Path(path.stem).suffix
        return inner if inner in COMPRESSIBLE else None
    return path.suffix if path.suffix in ROW_SUFFIXES else None


def _matching(pattern: str) -> list[Shard]:
    matches = sorted(map(Path, glob(pattern, recursive=True)))
    files = [path for path in matches if path.is_file()]
    if not files:
        found = f"matches only folders, such as {str(matches[0])!r}" if matches else "matches nothing"
        hint = "; add /*.parquet to match the files in them" if matches else "; correct the pattern"
        raise DataError(f"data source {pattern!r} {found}{_nearest(Path(pattern))}{hint}")
    return _of_one_kind(pattern, [_shard(path) for path in files])


def _shards_in(folder: Path) -> list[Shard]:
    if kind_of(folder) is not None:
        raise DataError(explain(folder, wanted="a folder of shards with rows"))
    files = [path for path in sorted(folder.iterdir()) if path.name[0] not in "._" and path.is_file()]
    shards = [Shard(path, suffix) for path in files if (suffix := _suffix(path)) is not None]
    if not shards:
        inner = next((path for path in sorted(folder.glob("*/*")) if path.is_file() and _suffix(path)), None)
        hint = f", as {str(folder / '**' / f'*{inner.suffix}')!r} does" if inner else ""
        raise DataError(
            f"folder {str(folder)!r} holds no file with rows ({WANTED}); name a folder or a glob that does{hint}"
        )
    return _of_one_kind(str(folder), shards)


def _of_one_kind(source: str, shards: Sequence[Shard]) -> list[Shard]:
    """Check that shards are of one kind and one split."""
    by_suffix = {shard.suffix: shard.path.name for shard in shards}
    if len(by_suffix) > 1:
        names = " and ".join(f"{suffix} ({name})" for suffix, name in sorted(by_suffix.items()))
        raise DataError(
            f"data source {source!r} holds files of several kinds: {names}; name one kind with a glob, as in "
            f"folder/*{next(iter(by_suffix))}"
        )
    paths = {shard.path for shard in shards}
    for path in sorted(paths):
        if path.suffix == ".gz" and path.with_suffix("") in paths:
            raise DataError(
                f"data source {source!r} holds both {path.stem!r} and {path.name!r}, which are the same rows twice; "
                "remove one of them"
            )
    splits = {found[1]: shard for shard in shards if (found := _SPLIT_NAME.match(shard.path.name))}
    if len(splits) > 1:
        some = next(iter(splits))
        raise DataError(
            f"data source {source!r} holds files of several splits: {', '.join(splits)}; name those of one, as in "
            f"folder/{some}*{splits[some].path.suffix}, or list the files one by one"
        )
    return list(shards)


def _saved_shards(folder: Path, *, split: str | None = None) -> list[Shard]:
    """Return the Arrow files of a folder that `datasets` saved."""
    listing = folder / DATASET_DICT_FILE
    if listing.is_file():
        splits = [str(name) for name in _list(listing, "splits")]
        if split is None and len(splits) != 1:
            raise DataError(
                f"{str(folder)!r} is a DatasetDict with the splits {', '.join(splits) or 'none'}; name one, as in "
                f"{folder}:{splits[0] if splits else 'train'}"
            )
        split = splits[0] if split is None else split
        if split not in splits:
            raise DataError(f"{str(folder)!r} has no split {split!r}{did_you_mean(split, splits)}")
        return _saved_shards(folder / split)
    if split is not None:
        raise DataError(
            f"{str(folder)!r} is one Dataset without splits; give the folder without {':' + split!r}"
        )
    state = folder / STATE_FILE
    if _value(state, "_indices_files") or _value(state, "_indices_data_files"):
        raise DataError(
            f"{str(folder)!r} was saved with an indices mapping, as old versions of `datasets` did; load it with "
            "`datasets`, and save it again"
        )
    paths = [folder / _file_name(entry, state) for entry in _list(state, "_data_files")]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        names = ", ".join(missing[:_MAX_NAMED])
        raise DataError(f"{str(folder)!r} lacks {names}, which {STATE_FILE} names; copy the folder again")
    return [Shard(path, ".arrow", may_be_empty=True) for path in paths]


def _file_name(entry: Any, path: Path) -> str:
    name: Any = cast(dict[str, Any], entry).get("filename") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise _damaged(path, "an entry of _data_files has no filename")
    return name


def _list(path: Path, key: str) -> list[Any]:
    value = _value(path, key)
    if not isinstance(value, list):
        raise _damaged(path, f"it has no list {key!r}")
    return cast(list[Any], value)


def _value(path: Path, key: str) -> Any:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    return cast(dict[str, Any], content).get(key) if isinstance(content, dict) else None


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{str(path)!r}, which `datasets` writes, is damaged ({why}); copy the folder again")


def _nearest(path: Path) -> str:
    """Describe the nearest existing folder above a missing path."""
    folder = next(
        parent for parent in (*path.parents, Path()) if not has_magic(str(parent)) and parent.is_dir()
    )
    names = sorted(inner.name for inner in folder.iterdir() if not inner.name.startswith("."))
    shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    return f" (the nearest folder that exists is {str(folder)!r}, with {shown or 'nothing in it'})"
