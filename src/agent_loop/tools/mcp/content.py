"""Conversion of MCP results to tool responses."""

from __future__ import annotations

import json
from typing import Any

from agent_loop.tools.base import ToolResponse


def as_response(result: Any, *, images: bool) -> ToolResponse:
    """Convert an MCP result to a tool response.

    Texts and embedded texts are joined, and images are attached. Any other content becomes a line of text that
    describes it.

    Args:
        result: A `CallToolResult`.
        images: Whether to attach images. If false, each becomes a line of text.
    """
    texts: list[str] = []
    pictures: list[Any] = []
    for block in result.content:
        if block.type == "image" and images:
            pictures.append(f"data:{block.mime_type};base64,{block.data}")
        else:
            texts.append(_text_of(block))
    if not result.content and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return ToolResponse(text="\n".join(texts), image=pictures or None)


def _text_of(block: Any) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        resource = block.resource
        text = getattr(resource, "text", None)
        return text if text is not None else f"[resource {resource.uri}, {_kind(resource)}, not shown]"
    if block.type == "resource_link":
        described = f": {block.description}" if block.description else ""
        return f"[resource {block.uri} {block.name!r}{described}]"
    return f"[{block.type}, {_kind(block)}, not shown]"


def _kind(block: Any) -> str:
    return block.mime_type or "of unknown type"
