"""One trajectory, with all that is known of each of its tokens, as the page takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.storage.vocabulary import Piece
from agent_loop.viewer.packets import packet
from agent_loop.viewer.plain_json import decoded, finite

JSON_COLUMNS = (
    "row",
    "messages",
    "tool_schemas",
    "feedback",
    "incidents",
    "spans",
    "metrics",
    "reward_extra",
    "extra_fields",
)
TOKEN_COLUMNS = {
    "logprobs": "response_logprobs",
    "train_logprobs": "train_logprobs",
    "advantages": "advantages",
}
"""What the page calls them, and under which name they are stored."""
LISTS = ("prompt_ids", "response_ids", "response_mask", "weight_versions", *TOKEN_COLUMNS.values())


def trajectory_packet(row: Mapping[str, Any], pieces: Sequence[Piece]) -> bytes:
    """A stored row as a packet. Arrays begin with the prompt's first token; NaN where a token has no such number.

    Args:
        pieces: The vocabulary; empty if it is not known.
    """
    prompt, response = _ids(row, "prompt_ids"), _ids(row, "response_ids")
    ids = np.concatenate([prompt, response])
    columns: dict[str, NDArray[Any]] = {"ids": ids}
    columns["mask"] = _behind(prompt, row.get("response_mask"), len(response), fill=0).astype(np.uint8)
    columns["versions"] = _behind(prompt, row.get("weight_versions"), len(response), fill=-1).astype(np.int32)
    for name, stored in TOKEN_COLUMNS.items():
        if row.get(stored) is not None:
            columns[name] = _behind(prompt, row[stored], len(response), fill=np.nan).astype(np.float32)
    columns["used_ids"] = used_ids = np.unique(ids)
    meta = {
        name: decoded(value) if name in JSON_COLUMNS else value
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


def _behind(prompt: NDArray[np.int32], values: Any, length: int, *, fill: float) -> NDArray[np.float64]:
    """The values of the response's tokens behind those of the prompt, which have none."""
    whole = np.full(len(prompt) + length, fill, np.float64)
    if values is not None and len(values) == length:
        whole[len(prompt) :] = values
    return whole
