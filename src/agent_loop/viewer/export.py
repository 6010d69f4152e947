"""Export of the page with its data to one HTML file that needs no server."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from agent_loop.errors import ConfigError, DataError
from agent_loop.storage.exclusive import whole_file
from agent_loop.storage.run import KEY, Key
from agent_loop.viewer.packets import encode_json
from agent_loop.viewer.pages import static_files, style_names
from agent_loop.viewer.run_files import RunFile
from agent_loop.viewer.source import RunSource

MAX_ROWS = 50_000
"""Most rows of the table."""
MAX_BYTES = 64 * 2**20
"""Most bytes of full trajectories and timelines, before compression."""
IMPORT = re.compile(r'(from\s+|import\s+)"\./([\w.]+)"')


@dataclass(slots=True)
class _EmbeddedParts:
    """Data that is embedded in the file."""

    packed: dict[str, bytes] = field(default_factory=dict[str, bytes])
    num_bytes: int = 0

    def add(self, name: str, data: bytes) -> str:
        self.packed[name] = data
        self.num_bytes += len(data)
        return name


def write_export(run: Path, *, target: Path, max_trajectories: int) -> str:
    """Write the file and return a line that describes its contents.

    Args:
        run: Folder of the run.
        target: HTML file to write.
        max_trajectories: Most trajectories to export with all their tokens. The newest steps come first.
    """
    source = RunSource(run)
    parts = _EmbeddedParts()
    files = _newest_files(source)
    parts.add("data-table", source.table([file.number for file in files]))
    num_rows = sum(source.files.scalars(file).num_rows for file in files)
    chosen = list(islice(_candidates(source, files), max_trajectories))
    trajectories = _add_trajectories(source, chosen, parts)
    timelines = _add_timelines(source, [(split, step) for _, _, (split, step, _) in chosen], parts)
    omitted = _omitted(source, num_rows=num_rows, num_full=len(trajectories), num_steps=len(timelines))
    state = source.state() | {"files": [file.number for file in files], "path": source.path.resolve().name}
    head = {
        "state": state,
        "config": source.config(),
        "metrics": source.metrics(),
        "omitted": omitted,
        "trajectories": trajectories,
        "timelines": timelines,
    }
    parts.add("data-head", encode_json(head))
    text = _page(parts.packed)
    try:
        with whole_file(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--export {str(target)!r} cannot be written ({error.strerror}); give another file"
        ) from error
    unreadable = [f"Unreadable: {problem}." for problem in state["problems"]]
    size = f"{len(text) / 2**20:.1f} MiB"
    return " ".join(
        [f"{target}: {num_rows} trajectories, {len(trajectories)} in full, {size}.", omitted, *unreadable]
    )


def _newest_files(source: RunSource) -> list[RunFile]:
    """Return the files that fit into the table, oldest first."""
    fitting: list[RunFile] = []
    num_rows = 0
    for file in reversed(source.files.refresh()):
        table = source.files.scalars(file)
        if table is None:
            continue
        num_rows += table.num_rows
        if fitting and num_rows > MAX_ROWS:
            break
        fitting.append(file)
    return fitting[::-1]


def _candidates(source: RunSource, files: Sequence[RunFile]) -> Iterator[tuple[int, int, Key]]:
    """Yield the number of the file, the row and the key of each trajectory, newest file first."""
    for file in reversed(files):
        table = source.files.scalars(file)
        if {*KEY} <= {*table.column_names}:
            for row, key in enumerate(zip(*(table[name].to_pylist() for name in KEY), strict=True)):
                yield file.number, row, key


def _add_trajectories(
    source: RunSource, chosen: Sequence[tuple[int, int, Key]], parts: _EmbeddedParts
) -> dict[str, dict[str, Any]]:
    added: dict[str, dict[str, Any]] = {}
    for file, row, (split, step, trajectory_id) in chosen:
        try:
            data = source.trajectory(split=split, step=step, trajectory_id=trajectory_id)
        except DataError as error:  # the file is damaged, or a running run has removed it
            source.files.problems.setdefault(file, str(error))
            continue
        if parts.num_bytes + len(data) > MAX_BYTES:
            break
        part = parts.add(f"data-trajectory-{len(added)}", data)
        added[f"{split} {step} {trajectory_id}"] = {"part": part, "file": file, "row": row}
    return added


def _add_timelines(source: RunSource, steps: list[tuple[str, int]], parts: _EmbeddedParts) -> dict[str, str]:
    added: dict[str, str] = {}
    for split, step in dict.fromkeys(steps):
        data = encode_json(source.timeline(split=split, step=step))
        if parts.num_bytes + len(data) > MAX_BYTES:
            break
        added[f"{split} {step}"] = parts.add(f"data-timeline-{len(added)}", data)
    return added


def _omitted(source: RunSource, *, num_rows: int, num_full: int, num_steps: int) -> str:
    """Return a sentence about the data that the file lacks; empty if nothing is missing."""
    tables = [source.files.scalars(file) for file in source.files.refresh()]
    num_stored = sum(table.num_rows for table in tables if table is not None)
    if num_full == num_stored == num_rows:
        return ""
    rows = "" if num_rows == num_stored else f"the newest {num_rows} of {num_stored} trajectories, and "
    return (
        f"This copy contains {rows}{num_full} of {num_stored} trajectories with messages and tokens, and the times "
        f"of {num_steps} steps. Search covers those {num_full} trajectories."
    )


def _page(parts: Mapping[str, bytes]) -> str:
    """Return the HTML of the page. Modules become `data:` URLs in an import map, so that nothing is loaded."""
    texts = static_files()
    modules = {
        f"viewer/{name}": "data:text/javascript;base64," + _base64(_renamed(text).encode())
        for name, text in texts.items()
        if name.endswith(".js")
    }
    imports = json.dumps({"imports": modules})
    start = 'import "viewer/main.js";'
    style = "\n".join(texts[name] for name in style_names())
    policy = (
        f"default-src 'none'; script-src data: '{_hash(imports)}' '{_hash(start)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = "\n".join(
        f'<script type="application/octet-stream" id="{name}">{_base64(gzip.compress(part, mtime=0))}</script>'
        for name, part in parts.items()
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>agent-loop view</title>\n'
        f"<style>{style}</style>\n"
        f'<script type="importmap">{imports}</script>\n</head>\n<body>\n{data}\n'
        f'<script type="module">{start}</script>\n</body>\n</html>\n'
    )


def _renamed(module: str) -> str:
    return IMPORT.sub(r'\1"viewer/\2"', module)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _hash(text: str) -> str:
    return "sha256-" + _base64(hashlib.sha256(text.encode()).digest())
