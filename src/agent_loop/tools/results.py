"""Result of one tool call: validation of what `execute` returned, and truncation of its text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

from msgspec import Struct, field, structs
from pydantic_core import to_jsonable_python

from agent_loop.errors import ToolBug
from agent_loop.runtime.describe import describe_error, describe_value, one_line
from agent_loop.runtime.numeric import REWARD_LIMIT, as_reward
from agent_loop.runtime.user_values import plain_mapping
from agent_loop.tools.base import ToolResponse
from agent_loop.trajectory import Incident, IncidentKind

MAX_DETAIL_CHARACTERS = 1000
"""Maximum length of the recorded message of a failed call. The model reads the whole message."""


class ToolResult(Struct, frozen=True):
    """Result of one tool call."""

    response: ToolResponse
    reward: float | None = None
    incident: Incident | None = None
    """Reason of a failed call, which the model reads in `response`."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that the tool records."""


def failed_result(kind: IncidentKind, detail: str) -> ToolResult:
    """Return the result of a failed call; the model reads `detail`."""
    detail = _encodable(detail)
    incident = Incident(kind, one_line(detail, max_length=MAX_DETAIL_CHARACTERS))
    return ToolResult(ToolResponse(text=detail), incident=incident)


def read_result(returned: Any, *, name: str) -> ToolResult:
    """Validate what `execute` returned.

    The full form is `(response, reward, extra)`. Reward and extra may be omitted or None, and the response may be
    returned alone. A str is the response's text; a dict is converted to JSON text.
    """
    parts = cast(tuple[Any, ...], returned) if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise ToolBug(f"tool {name!r} returned {describe_value(returned)}; {_SHAPE}")
    response, reward, extra = (*parts, None, None)[:3]
    if not isinstance(response, ToolResponse):
        response = _as_response(response, returned, name=name)
    if response.text is not None and not isinstance(cast(Any, response.text), str):
        raise ToolBug(
            f"tool {name!r} returned {describe_value(response)} as its response; return ToolResponse(text=str)"
        )
    for kind, sources in (("image", response.image), ("video", response.video)):
        if sources is not None and not isinstance(cast(Any, sources), (list, tuple)):
            raise ToolBug(
                f"tool {name!r} returned ToolResponse({kind}={describe_value(sources)}); return a list of them"
            )
    if extra is not None and not isinstance(extra, dict):
        raise ToolBug(f"tool {name!r} returned {describe_value(extra)} in the third place; return a dict")
    text = response.text
    if text is not None and (type(text) is not str or not text.isascii()):
        response = structs.replace(response, text=_encodable(text))
    return ToolResult(
        response,
        reward=None if reward is None else read_reward(reward, where=f"tool {name!r}"),
        extra=plain_mapping(cast(dict[Any, Any], extra or {}), where=f"extra of tool {name!r}"),
    )


_SHAPE = "return (ToolResponse, reward or None, dict), or the ToolResponse, a str or a dict alone"


def _as_response(value: Any, returned: Any, *, name: str) -> ToolResponse:
    if isinstance(value, str):
        return ToolResponse(text=value)
    if not isinstance(value, dict):
        raise ToolBug(f"tool {name!r} returned {describe_value(returned)}; {_SHAPE}")
    try:
        return ToolResponse(text=json.dumps(value, ensure_ascii=False, default=to_jsonable_python))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolBug(
            f"tool {name!r} returned {describe_value(cast(Any, value))}, which has no JSON form "
            f"({describe_error(error)}); return ToolResponse(text=str)"
        ) from error


def read_reward(reward: Any, *, where: str) -> float:
    """Return a reward as a float."""
    number = as_reward(reward)
    if number is None:
        raise ToolBug(
            f"{where} returned {describe_value(reward)} as its reward; return a finite number, or None {REWARD_LIMIT}"
        )
    return number


def _encodable(text: str) -> str:
    """Return the text with each half of a surrogate pair replaced, since records cannot be written with one."""
    return text.encode(errors="replace").decode()


TruncateSide: TypeAlias = Literal["left", "right", "middle"]
"""Part of the text that is kept: `left` keeps its beginning, `right` its end, `middle` both ends."""

MARKERS: dict[TruncateSide, str] = {
    "left": "...(truncated)",
    "right": "(truncated)...",
    "middle": "...(truncated)...",
}

_WINDOW_CHARS_PER_TOKEN = 32
"""Characters per token of the part that is encoded. Of a much longer text, only the two ends are encoded."""
_CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Character that decoding produces where the cut falls inside a character."""


def truncate_tokens(
    text: str,
    *,
    max_tokens: int,
    side: TruncateSide,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[list[int]], str],
) -> tuple[str, bool]:
    """Return the text in at most `max_tokens` tokens, including the marker, and whether it was truncated.

    A text within the limit is returned unchanged. The result is encoded again to check its length, so the limit also
    holds for tokenizers that merge tokens across the cut. If the limit is too small for the marker, the text is
    truncated without a marker.
    """
    # A text has at most as many tokens as bytes, plus a special token at the start.
    if len(text.encode(errors="replace")) < max_tokens:
        return text, False
    head_ids, tail_ids = _encode_ends(text, max_tokens=max_tokens, encode=encode)
    if len(head_ids) <= max_tokens:
        return text, False
    marker = MARKERS[side]
    num_marker_tokens = len(encode(marker))
    if num_marker_tokens >= max_tokens:
        marker, num_marker_tokens = "", 0
    num_kept = max_tokens - num_marker_tokens
    while num_kept > 0:
        num_head = {"left": num_kept, "right": 0, "middle": (num_kept + 1) // 2}[side]
        num_tail = num_kept - num_head
        head = decode(list(head_ids[:num_head])).rstrip(_CUT_CHARACTER) if num_head else ""
        tail = decode(list(tail_ids[-num_tail:])).lstrip(_CUT_CHARACTER) if num_tail else ""
        shortened = head + marker + tail
        excess = len(encode(shortened)) - max_tokens
        if excess <= 0:
            return shortened, True
        num_kept -= excess
    return marker, True


def _encode_ends(
    text: str, *, max_tokens: int, encode: Callable[[str], Sequence[int]]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return token ids of the beginning and of the end; for all but very long texts, both are those of the whole."""
    window = _WINDOW_CHARS_PER_TOKEN * (max_tokens + 1)
    if len(text) > 2 * window:
        head_ids, tail_ids = encode(text[:window]), encode(text[-window:])
        if len(head_ids) > max_tokens and len(tail_ids) > max_tokens:
            return head_ids, tail_ids
    ids = encode(text)
    return ids, ids
