"""Weight transfer through files, for any two processes that share a folder."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.checksum import checksum
from agent_loop.weights.expected import INDEX_FILE, expected_weights
from agent_loop.weights.handle import TensorSpec, WeightHandle, refuse_duplicates
from agent_loop.weights.packing import dtype_name, pack, to_bytes

SHARD_BYTES = 4 << 30
"""Size of a file, unless a single tensor is larger. At most this much is held in host memory at once."""
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
)


class DiskSender:
    """Sender that writes a folder for each offer, and deletes it when the offer ends."""

    def __init__(self, *, has_checksums: bool, folder: Path | None, like: Path | None, keep: bool) -> None:
        self._has_checksums = has_checksums
        self._parent = folder
        self._temporary: Path | None = None
        self._like = like
        self._keep = keep

    @contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Write weights to a folder and yield their handle. See `WeightSender.offer`."""
        folder = self._parent_folder() / f"weights-{weight_version:06d}-{secrets.token_hex(4)}"
        try:
            written = _write(weights, folder=folder, like=self._like, has_checksums=self._has_checksums)
            yield WeightHandle(
                transport="disk",
                weight_version=weight_version,
                tensors=written.tensors,
                source={"folder": str(folder), "files": list(written.files), "aliases": written.aliases},
                has_checksums=self._has_checksums,
            )
        finally:
            if not self._keep:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._temporary is not None and not self._keep:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None

    def _parent_folder(self) -> Path:
        if self._parent is not None:
            self._parent.mkdir(parents=True, exist_ok=True)
            return self._parent.absolute()
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="agent-loop-weights-"))
        return self._temporary


def write_checkpoint(
    weights: Iterable[tuple[str, Tensor]], *, folder: str | Path, like: str | Path
) -> tuple[str, ...]:
    """Write a model folder that `transformers` and engines can load: weights, and the other files of another model
    folder.

    The folder is written completely or not at all. Only one of several tied weights is written, under its name in
    `like`.

    Args:
        weights: Weights under the names of the model's state dict.
        folder: Folder to write. It must be empty or not exist.
        like: Model folder to copy the configuration, tokenizer and other files from.

    Returns:
        The names of the weight files.

    Raises:
        WeightsError: `like` is not a model folder, or a tensor cannot be written.
    """
    return _write(weights, folder=Path(folder).absolute(), like=Path(like), has_checksums=False).files


def receive_disk(handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield tensors that are copies of the files' contents and stay valid."""
    folder = Path(handle.field("folder", str))
    files = cast(list[Any], handle.field("files", list))
    aliases = cast(dict[str, str], handle.field("aliases", dict))
    missing = [spec.name for spec in handle.tensors if spec.bucket >= len(files)]
    if missing:
        raise WeightsError(f"weight {missing[0]!r} is in none of the offer's files; publish again")
    for index, file in enumerate(files):
        path = folder / Path(str(file)).name
        try:
            with cast(Any, safe_open(path, framework="pt")) as opened:
                for spec in handle.tensors:
                    if spec.bucket == index:
                        tensor = opened.get_tensor(aliases.get(spec.name, spec.name))
                        if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (spec.dtype, spec.shape):
                            raise WeightsError(
                                f"weight {spec.name!r} on disk has another dtype or shape than offered; publish again"
                            )
                        yield spec, tensor
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"the weights in {str(path)!r} cannot be read ({error}): the offer has ended, or this process has no "
                "access to the sender's files; give the sender a folder that both can read"
            ) from error


@dataclass(frozen=True, slots=True)
class _WrittenFiles:
    tensors: tuple[TensorSpec, ...]
    files: tuple[str, ...]
    aliases: dict[str, str]
    """Name in the file of each tied weight that is stored under another name."""


def _write(
    weights: Iterable[tuple[str, Tensor]], *, folder: Path, like: Path | None, has_checksums: bool
) -> _WrittenFiles:
    temporary = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        preferred = frozenset[str]()
        if like is not None:
            preferred = frozenset(expected_weights(like))
            _copy_other_files(like, temporary)
        written = _write_shards(weights, temporary, preferred=preferred, has_checksums=has_checksums)
        if len(written.files) > 1:
            _write_index(written, temporary / INDEX_FILE)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


def _write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, *, preferred: frozenset[str], has_checksums: bool
) -> _WrittenFiles:
    specs: list[TensorSpec] = []
    aliases: dict[str, str] = {}
    shard = _ShardWriter(preferred)
    num_shards = 0
    for spec, tensor in pack(weights, bucket_bytes=SHARD_BYTES):
        if spec.bucket > num_shards:
            aliases |= shard.save(folder / f"{num_shards}.part")
            shard, num_shards = _ShardWriter(preferred), num_shards + 1
        on_cpu = tensor.detach().to("cpu").contiguous()
        crc = checksum(to_bytes(on_cpu, name=spec.name)) if has_checksums else None
        specs.append(replace(spec, offset=0, checksum=crc))
        shard.add(spec.name, tensor, on_cpu)
    aliases |= shard.save(folder / f"{num_shards}.part")
    refuse_duplicates(tuple(specs))
    total = num_shards + 1
    files = tuple(
        "model.safetensors" if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"
        for number in range(total)
    )
    for number, file in enumerate(files):
        os.replace(folder / f"{number}.part", folder / file)
    return _WrittenFiles(tuple(specs), files, aliases)


class _ShardWriter:
    """Collects the tensors of one file. It keeps the original tensors alive, so that equal addresses mean tied
    weights."""

    def __init__(self, preferred: frozenset[str]) -> None:
        self._preferred = preferred
        self._names_at: dict[tuple[Any, ...], list[str]] = {}
        self._originals: list[Tensor] = []
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, original: Tensor, on_cpu: Tensor) -> None:
        address = (original.device, original.data_ptr(), original.dtype, original.shape, original.stride())
        key = address if original.numel() else (name,)
        self._originals.append(original)
        self._names_at.setdefault(key, []).append(name)
        self._tensors[name] = on_cpu

    def save(self, path: Path) -> dict[str, str]:
        """Write the file and return the aliases of tied weights."""
        aliases: dict[str, str] = {}
        storages: set[int] = set()
        tensors: dict[str, Tensor] = {}
        for names in self._names_at.values():
            kept = next((name for name in names if name in self._preferred), names[0])
            aliases |= {name: kept for name in names if name != kept}
            tensor = self._tensors[kept]
            # safetensors rejects tensors that share a storage.
            storage = tensor.untyped_storage().data_ptr()
            tensors[kept] = tensor.clone() if tensor.numel() and storage in storages else tensor
            storages.add(storage)
        cast(Any, safetensors.torch).save_file(tensors, path, metadata={"format": "pt"})
        return aliases


def _write_index(written: _WrittenFiles, path: Path) -> None:
    weight_map = {
        spec.name: written.files[spec.bucket] for spec in written.tensors if spec.name not in written.aliases
    }
    total = sum(spec.num_bytes for spec in written.tensors if spec.name in weight_map)
    path.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}), encoding="utf-8"
    )


def _copy_other_files(like: Path, folder: Path) -> None:
    if not (like / "config.json").is_file():
        raise WeightsError(f"{str(like)!r} has no config.json; give the folder of a model")
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, folder / file.name)
