"""Weight transfer through files, for any two processes that share a folder."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import safetensors.torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.expected import INDEX_FILE, expected_weights
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.tensors import checksum, from_bytes, pack

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

    def __init__(self, *, folder: Path | None, like: Path | None) -> None:
        self._parent = folder
        self._temporary: Path | None = None
        self._like = like

    @contextmanager
    def offer(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> Generator[WeightHandle]:
        """Write weights to a folder and yield their handle. See `WeightSender.offer`.

        Only one of several tied weights is written, under its name in `like` if there is one.
        """
        folder = self._parent_folder() / f"weights-{weight_version:06d}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            preferred = frozenset[str]()
            if self._like is not None:
                preferred = frozenset(expected_weights(self._like))
                _copy_other_files(self._like, folder)
            written = _ShardWriter(folder, preferred)
            for spec, data_N in pack(weights, bucket_bytes=SHARD_BYTES):
                written.add(spec, data_N)
            written.finish()
            yield WeightHandle(
                transport="disk",
                weight_version=weight_version,
                tensors=tuple(written.specs),
                source={"folder": str(folder), "files": written.files, "aliases": written.aliases},
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None

    def _parent_folder(self) -> Path:
        if self._parent is not None:
            self._parent.mkdir(parents=True, exist_ok=True)
            return self._parent.absolute()
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="agent-loop-weights-"))
        return self._temporary


def receive_disk(handle: WeightHandle) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield tensors that are copies of the files' contents and stay valid."""
    folder = Path(handle.source["folder"])
    files, aliases = handle.source["files"], handle.source["aliases"]
    path = folder
    try:
        for index, members in groupby(handle.tensors, key=lambda spec: spec.bucket):
            path = folder / files[index]
            with cast(Any, safe_open(path, framework="pt")) as opened:
                for spec in members:
                    yield spec, opened.get_tensor(aliases.get(spec.name, spec.name))
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"the weights in {str(path)!r} cannot be read ({error}): the offer has ended, or this process has no "
            "access to the sender's files; give the sender a folder that both can read"
        ) from error


class _ShardWriter:
    """Writes the files of one offer.

    The tensors of a file are kept until it is written, so that equal addresses mean tied weights.
    """

    def __init__(self, folder: Path, preferred: frozenset[str]) -> None:
        self.specs: list[TensorSpec] = []
        self.files: list[str] = []
        self.aliases: dict[str, str] = {}
        """Name in the file of each tied weight that is stored under another name."""
        self._folder = folder
        self._preferred = preferred
        self._shard: dict[Hashable, list[tuple[TensorSpec, Tensor]]] = {}

    def add(self, spec: TensorSpec, data_N: Tensor) -> None:
        """Add a tensor. The first tensor of a bucket writes the file of the bucket before."""
        if spec.bucket > len(self.files):
            self._save()
        self.specs.append(replace(spec, offset=0, checksum=checksum(data_N)))
        address = (data_N.device, data_N.data_ptr(), spec.dtype, spec.shape)
        key: Hashable = address if len(data_N) else spec.name
        self._shard.setdefault(key, []).append((spec, data_N))

    def finish(self) -> None:
        """Write the last file, and the index if there are several."""
        self._save()
        if len(self.files) == 1:
            os.replace(self._folder / self.files[0], self._folder / "model.safetensors")
            self.files = ["model.safetensors"]
            return
        stored = [spec for spec in self.specs if spec.name not in self.aliases]
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for spec in stored)},
            "weight_map": {spec.name: self.files[spec.bucket] for spec in stored},
        }
        (self._folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for tied in self._shard.values():
            spec, data_N = next((each for each in tied if each[0].name in self._preferred), tied[0])
            self.aliases |= {other.name: spec.name for other, _ in tied if other is not spec}
            # A copy, because safetensors rejects tensors that share a storage.
            tensors[spec.name] = from_bytes(data_N.to("cpu", copy=True), spec)
        self.files.append(f"model-{len(self.files) + 1:05d}.safetensors")
        cast(Any, safetensors.torch).save_file(
            tensors, self._folder / self.files[-1], metadata={"format": "pt"}
        )
        self._shard = {}


def _copy_other_files(like: Path, folder: Path) -> None:
    if not (like / "config.json").is_file():
        raise WeightsError(f"{str(like)!r} has no config.json; give the folder of a model")
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, folder / file.name)
