"""What comes of one call, and whether it is what a tool may return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec import Struct, field, structs

from agent_loop.boundary import as_finite_number, describe_value, one_line
from agent_loop.errors import ToolBug
from agent_loop.tools.base import ToolResponse
from agent_loop.trajectory import Incident, IncidentKind

MAX_DETAIL_CHARACTERS = 1000
"""Of what is recorded of a call that did not work; the model reads all of it."""


class ToolResult(Struct, frozen=True):
    """What came of one call."""

    response: ToolResponse
    reward: float | None = None
    incident: Incident | None = None
    """Why the call did not work, where it did not; `response` says it to the model."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the tool found worth recording."""


def refusal(kind: IncidentKind, detail: str) -> ToolResult:
    """What the model is told of a call that did not work."""
    detail = _encodable(detail)
    incident = Incident(kind, one_line(detail, max_length=MAX_DETAIL_CHARACTERS))
    return ToolResult(ToolResponse(text=detail), incident=incident)


def read_result(returned: Any, *, name: str) -> ToolResult:
    """Checks what `execute` returned; a plain str may stand in the response's place.

    Raises:
        ToolBug: It is no result.
    """
    parts: tuple[Any, ...] = cast(tuple[Any, ...], returned) if isinstance(returned, tuple) else ()
    if len(parts) != 3:
        raise ToolBug(
            f"tool {name!r} returned {describe_value(returned)}; return (ToolResponse, reward or None, dict)"
        )
    response, reward, extra = parts
    if isinstance(response, str):
        response = ToolResponse(text=response)
    if not isinstance(response, ToolResponse) or not _is_text_or_none(response.text):
        raise ToolBug(
            f"tool {name!r} returned {describe_value(response)} as its response; return ToolResponse(text=str)"
        )
    if response.image is not None or response.video is not None:
        _check_media({"image": response.image, "video": response.video}, name=name)
    if not isinstance(extra, dict):
        raise ToolBug(f"tool {name!r} returned {describe_value(extra)} in the third place; return a dict")
    if reward is not None:
        reward = read_reward(reward, where=f"tool {name!r}")
    if response.text and not response.text.isascii():
        response = structs.replace(response, text=_encodable(response.text))
    return ToolResult(response, reward=reward, extra=cast(dict[str, Any], extra))


def read_reward(reward: Any, *, where: str) -> float:
    """Raises: ToolBug: It is no finite number."""
    number = as_finite_number(reward)
    if number is None:
        raise ToolBug(
            f"{where} returned {describe_value(reward)} as its reward; return a finite number, or None"
        )
    return number


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _check_media(media: Mapping[str, Any], *, name: str) -> None:
    """Raises: ToolBug: There is something else than a list of them."""
    for kind, sources in media.items():
        if sources is not None and not isinstance(sources, (list, tuple)):
            raise ToolBug(
                f"tool {name!r} returned ToolResponse({kind}={describe_value(sources)}); return a list of them"
            )


def _encodable(text: str) -> str:
    """The text with each half of a surrogate pair replaced: no record could be written with one."""
    return text.encode(errors="replace").decode()
