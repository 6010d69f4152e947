"""Data of one trajectory with all values of each token, and the times and spans of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.storage.columns import JSON_COLUMNS
from agent_loop.storage.vocabulary import Piece
from agent_loop.viewer.packets import decode_json, packet
from agent_loop.viewer.run_files import RunFiles

TOKEN_COLUMNS = {
    "logprobs": "response_logprobs",
    "train_logprobs": "train_logprobs",
    "advantages": "advantages",
}
"""Name on the page and stored name of each column of token values."""
LISTS = ("prompt_ids", "response_ids", "response_mask", "weight_versions", *TOKEN_COLUMNS.values())


def trajectory_packet(row: Mapping[str, Any], pieces: Sequence[Piece]) -> bytes:
    """Return a stored row as a packet. Arrays begin at the first prompt token and have NaN where a value is missing.

    Args:
        row: Columns of the stored trajectory.
        pieces: The vocabulary; empty if unknown.
    """
    prompt, response = _ids(row, "prompt_ids"), _ids(row, "response_ids")
    ids = np.concatenate([prompt, response])
    columns: dict[str, NDArray[Any]] = {"ids": ids}
    columns["mask"] = _after_prompt(prompt, row.get("response_mask"), len(response), fill=0).astype(np.uint8)
    columns["versions"] = _after_prompt(prompt, row.get("weight_versions"), len(response), fill=-1).astype(
        np.int32
    )
    for name, stored in TOKEN_COLUMNS.items():
        if row.get(stored) is not None:
            columns[name] = _after_prompt(prompt, row[stored], len(response), fill=np.nan).astype(np.float32)
    columns["used_ids"] = used_ids = np.unique(ids)
    meta = {
        name: decode_json(value) if name in JSON_COLUMNS else value
        for name, value in row.items()
        if name not in LISTS
    }
    used: list[Piece | None] = [
        pieces[token] if 0 <= token < len(pieces) else None for token in map(int, used_ids)
    ]
    return packet(meta | {"pieces": used}, columns)


def _ids(row: Mapping[str, Any], name: str) -> NDArray[np.int32]:
    values = row.get(name)
    return np.zeros(0, np.int32) if values is None else np.asarray(values, np.int32)


def _after_prompt(prompt: NDArray[np.int32], values: Any, length: int, *, fill: float) -> NDArray[np.float64]:
    """Return an array with `fill` for the prompt, followed by the values of the response."""
    whole = np.full(len(prompt) + length, fill, np.float64)
    if values is not None and len(values) == length:
        whole[len(prompt) :] = values
    return whole


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
    entries: dict[tuple[Any, Any], dict[str, Any]] = {}
    for file, rows in files.find(split=split, step=step):
        table = files.columns(file, COLUMNS)
        if table is None or rows[-1] >= table.num_rows:  # a running run has just replaced the file
            continue
        for row in table.take(rows).to_pylist():
            key = row.get("group"), row.get("rollout")
            if row.get("spans") is not None and key not in entries:
                entries[key] = _entry(row)
    return list(entries.values())


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    versions = _versions(row.get("segments") or ())
    spans = decode_json(row["spans"])
    shown = {name: value for name, value in row.items() if name not in ("segments", "spans")}
    return shown | {"spans": [_with_version(span, versions) for span in spans]}


def _versions(segments: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the weight version of each model segment, by the number of tokens before the segment."""
    starts = accumulate((segment["num_tokens"] for segment in segments), initial=0)
    return {
        start: segment["weight_version"]
        for start, segment in zip(starts, segments, strict=False)
        if segment["weight_version"] is not None
    }


def _with_version(span: list[Any], versions: Mapping[int, int]) -> list[Any]:
    kind, name, start, end, details = span
    version = versions.get(details.get("num_prompt_tokens", -1)) if kind == "generate" else None
    return [kind, name, start, end, details if version is None else details | {"weight_version": version}]
