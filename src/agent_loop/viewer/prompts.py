"""Trajectories of the same prompt in several runs and steps."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agent_loop.storage.run import parquet_files
from agent_loop.storage.schema import compute, pa, parquet
from agent_loop.training.evaluation.scores import prompt_digest, prompt_text
from agent_loop.viewer.run_record import stamp_of

COLUMNS = ("split", "step", "trajectory_id", "reward", "is_success", "stop_reason", "row")
MAX_PROMPTS = 200
"""Most prompts in a list."""


class PromptSample(NamedTuple):
    """A trajectory of a prompt."""

    split: str
    step: int
    trajectory_id: str
    reward: float | None
    is_success: bool | None
    stop_reason: str | None


class FilePrompts(NamedTuple):
    """Prompts of one file by their digest."""

    texts: Mapping[str, str]
    samples: Mapping[str, Sequence[PromptSample]]


class PromptIndex:
    """Index of the trajectories by their prompts. Each file is read once, without tokens. Methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[Any, FilePrompts]] = {}
        self._runs: dict[str, list[FilePrompts]] = {}

    def add_run(self, key: str, path: Path) -> int:
        """Read the files of a run that are new, and return how many prompts it has."""
        with self._lock:
            self._runs[key] = [self._read(file) for file in parquet_files(path)]
            return len({digest for file in self._runs[key] for digest in file.texts})

    def listed(self, text: str) -> dict[str, Any]:
        """Return the prompts that contain a text, those of the most runs and trajectories first."""
        found: dict[str, dict[str, Any]] = {}
        wanted = text.casefold()
        for key, files in self._runs.items():
            for file in files:
                for digest, prompt in file.texts.items():
                    if wanted in prompt.casefold():
                        entry = found.setdefault(digest, {"digest": digest, "prompt": prompt, "runs": {}})
                        entry["runs"][key] = entry["runs"].get(key, 0) + len(file.samples[digest])
        ordered = sorted(
            found.values(), key=lambda entry: (-len(entry["runs"]), -sum(entry["runs"].values()))
        )
        return {"num_prompts": len(ordered), "prompts": ordered[:MAX_PROMPTS]}

    def prompt(self, digest: str) -> dict[str, Any]:
        """Return the trajectories of a prompt in each run, in the order of the steps."""
        texts = [
            file.texts[digest] for files in self._runs.values() for file in files if digest in file.texts
        ]
        runs = {
            key: [sample._asdict() for file in files for sample in file.samples.get(digest, ())]
            for key, files in self._runs.items()
        }
        return {
            "prompt": texts[0] if texts else None,
            "runs": {key: samples for key, samples in runs.items() if samples},
        }

    def _read(self, path: Path) -> FilePrompts:
        stamp = stamp_of(path)
        known = self._files.get(path)
        if known is None or known[0] != stamp:
            known = self._files[path] = stamp, _read_file(path)
        return known[1]


def _read_file(path: Path) -> FilePrompts:
    """Return the prompts of a file; none if it cannot be read."""
    try:
        with parquet.ParquetFile(path) as stored:
            if not {*COLUMNS} <= {*stored.schema_arrow.names}:
                return FilePrompts({}, {})
            table = stored.read([*COLUMNS])
    except (OSError, pa.ArrowException):
        return FilePrompts({}, {})
    # The trajectories of a group have equal rows, so each is parsed once.
    encoded = compute.dictionary_encode(table["row"].combine_chunks())
    encoded = encoded if isinstance(encoded, pa.DictionaryArray) else encoded.combine_chunks()
    digests: list[str] = []
    texts: dict[str, str] = {}
    for document in encoded.dictionary.to_pylist():
        row = json.loads(document)
        digests.append(prompt_digest(row))
        texts.setdefault(digests[-1], prompt_text(row))
    samples: dict[str, list[PromptSample]] = {}
    codes: list[int | None] = encoded.indices.to_pylist()
    values = zip(*(table[name].to_pylist() for name in COLUMNS[:-1]), strict=True)
    for code, found in zip(codes, values, strict=True):
        if code is not None:
            samples.setdefault(digests[code], []).append(PromptSample(*found))
    return FilePrompts({digest: texts[digest] for digest in samples}, samples)
