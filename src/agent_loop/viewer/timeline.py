"""Times and spans of the trajectories of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

from agent_loop.viewer.plain_json import decode_json
from agent_loop.viewer.run_files import RunFiles

COLUMNS = (
    "trajectory_id",
    "group",
    "rollout",
    "branch",
    "began_at",
    "seconds",
    "reward",
    "is_success",
    "stop_reason",
    "num_turns",
    "spans",
    "segments",
)


def timeline(files: RunFiles, *, split: str, step: int) -> list[dict[str, Any]]:
    """Return one entry per traced trajectory. The branches of a row share one entry."""
    stored_rows = files.find(split=split, step=step)
    tables = {stored_row.file.number: files.columns(stored_row.file, COLUMNS) for stored_row in stored_rows}
    entries: dict[tuple[Any, Any], dict[str, Any]] = {}
    for stored_row in stored_rows:
        table = tables[stored_row.file.number]
        if table is None or stored_row.row >= table.num_rows:
            continue
        row = _row(table, stored_row.row)
        key = row.get("group"), row.get("rollout")
        if row.get("spans") is not None and key not in entries:
            entries[key] = _entry(row)
    return list(entries.values())


def _row(table: Any, row: int) -> dict[str, Any]:
    return {name: table[name][row].as_py() for name in table.column_names}


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    versions = _versions(row.get("segments") or ())
    spans = decode_json(row["spans"])
    shown = {name: value for name, value in row.items() if name not in ("segments", "spans")}
    return shown | {"spans": [_with_version(span, versions) for span in spans if _is_span(span)]}


def _is_span(value: Any) -> bool:
    span = cast(list[Any], value)
    return (
        isinstance(value, list)
        and len(span) >= 4
        and all(isinstance(edge, int | float) for edge in span[2:4])
    )


def _versions(segments: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the weight version of each model segment, by the number of tokens before the segment."""
    starts = accumulate((segment["num_tokens"] for segment in segments), initial=0)
    return {
        start: segment["weight_version"]
        for start, segment in zip(starts, segments, strict=False)
        if segment["weight_version"] is not None
    }


def _with_version(span: list[Any], versions: Mapping[int, int]) -> list[Any]:
    kind, name, start, end, *rest = span
    details = dict(cast(dict[str, Any], rest[0])) if rest and isinstance(rest[0], dict) else {}
    if kind == "generate" and (version := versions.get(details.get("num_prompt_tokens", -1))) is not None:
        details["weight_version"] = version
    return [kind, name, start, end, details]
