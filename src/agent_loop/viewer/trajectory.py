"""Packet of one trajectory with all values of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.storage.schema import JSON_COLUMNS
from agent_loop.storage.vocabulary import Piece
from agent_loop.viewer.packets import packet
from agent_loop.viewer.plain_json import decode_json, finite

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
    return packet(finite(meta) | {"pieces": used}, columns)


def _ids(row: Mapping[str, Any], name: str) -> NDArray[np.int32]:
    values = row.get(name)
    return np.zeros(0, np.int32) if values is None else np.asarray(values, np.int32)


def _after_prompt(prompt: NDArray[np.int32], values: Any, length: int, *, fill: float) -> NDArray[np.float64]:
    """Return an array with `fill` for the prompt, followed by the values of the response."""
    whole = np.full(len(prompt) + length, fill, np.float64)
    if values is not None and len(values) == length:
        whole[len(prompt) :] = values
    return whole
