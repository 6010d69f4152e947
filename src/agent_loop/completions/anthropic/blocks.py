"""Content blocks of the Messages API, and what they are in chat messages."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import ValidationError

from agent_loop.completions.fields import Ignored, Only, RequestModel
from agent_loop.completions.requests import request_error
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line

Part: TypeAlias = dict[str, Any]
"""Content part of a chat message."""


class Block(RequestModel):
    """Content block."""

    type: str
    cache_control: Ignored = None


class ContentBlock(Block, ABC):
    """Block that the model reads as content of a message."""

    @abstractmethod
    def parts(self, *, where: str) -> list[Part]:
        """Return the content parts of the block.

        Args:
            where: Path of the block in the request, for errors.
        """


class TextBlock(ContentBlock):
    """Text."""

    text: str
    citations: Ignored = None
    """Passages that an earlier answer cited."""

    def parts(self, *, where: str) -> list[Part]:
        return [text_part(self.text)]


class ImageSource(RequestModel):
    """Image in the request. URLs and uploaded files are not supported."""

    type: Annotated[str, Only("base64")]
    media_type: str
    data: str


class ImageBlock(ContentBlock):
    """Image."""

    source: ImageSource

    def parts(self, *, where: str) -> list[Part]:
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return [{"type": "image_url", "image_url": {"url": url}}]


class DocumentSource(RequestModel):
    """Text of a document. PDF files, URLs and uploaded files are not supported."""

    type: Annotated[str, Only("text", "content")]
    media_type: Annotated[Any, Only("text/plain")] = None
    data: str | None = None
    content: str | list[dict[str, Any]] | None = None


class DocumentBlock(ContentBlock):
    """Document, which becomes text with a heading."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Annotated[Any, Only({"enabled": False})] = None

    def parts(self, *, where: str) -> list[Part]:
        opening = "\n".join(filter(None, ["<document>", self.title, self.context]))
        return [text_part(opening), *self._inner(f"{where}.source.content"), text_part("</document>")]

    def _inner(self, where: str) -> list[Part]:
        content = self.source.content
        if content is None:
            return [text_part(self.source.data or "")]
        return (
            [text_part(content)]
            if isinstance(content, str)
            else content_parts(content, where=where, kinds=SIMPLE)
        )


class SearchResultBlock(ContentBlock):
    """Search result, which becomes text with its title and its source as a heading."""

    title: str
    source: str
    content: list[dict[str, Any]]
    citations: Annotated[Any, Only({"enabled": False})] = None

    def parts(self, *, where: str) -> list[Part]:
        opening = f"<search_result>\n{self.title}\n{self.source}"
        inner = content_parts(self.content, where=f"{where}.content", kinds=("text",))
        return [text_part(opening), *inner, text_part("</search_result>")]


class ToolUseBlock(Block):
    """Tool call of an assistant message."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, Only({"type": "direct"})] = None
    toolset_name: Annotated[Any, Only()] = None

    def call(self) -> dict[str, Any]:
        """Return the tool call of a chat message."""
        function = {"name": self.name, "arguments": json.dumps(self.input)}
        return {"type": "function", "id": self.id, "function": function}


class ToolResultBlock(Block):
    """Result of a tool call."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    toolset_name: Annotated[Any, Only()] = None

    def message(self, *, where: str) -> dict[str, Any]:
        """Return the chat message of the tool. The text of a failed call begins with `Error: `."""
        content = self.content or ""
        is_text = isinstance(content, str)
        parts = (
            [text_part(content)] if is_text else content_parts(content, where=f"{where}.content", kinds=RICH)
        )
        if self.is_error:
            parts = _as_error(parts)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": parts}


class ThinkingBlock(Block):
    """Reasoning of an assistant message."""

    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(Block):
    """Encrypted reasoning of another model, which is left out."""

    data: Ignored = None


BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}
SIMPLE = ("text", "image")
RICH = (*SIMPLE, "document", "search_result")
USER = (*RICH, "tool_result")
_PATH_PARTS = re.compile(r"\w+")
ASSISTANT = ("text", "tool_use", "thinking", "redacted_thinking")


def read_block(block: Mapping[str, Any], *, where: str, kinds: Sequence[str]) -> Block:
    """Validate a block.

    Args:
        block: The block.
        where: Path of the block in the request, for errors.
        kinds: Types of blocks that are allowed there.

    Raises:
        RequestError: The type is not allowed there, or a field is unknown, missing or not supported.
    """
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        shown = one_line(json.dumps(kind), max_length=80)
        raise RequestError(
            f"{where}: blocks of type {shown} are not supported here; give {', '.join(kinds)}", param=where
        )
    try:
        return BLOCKS[kind].model_validate(block)
    except ValidationError as error:
        path = tuple(int(name) if name.isdigit() else name for name in _PATH_PARTS.findall(where))
        faults = [{**fault, "loc": (*path, *fault["loc"])} for fault in error.errors()]
        raise request_error(faults, known=BLOCKS[kind]) from None


def content_parts(
    blocks: Sequence[Mapping[str, Any]], *, where: str, kinds: Sequence[str], start: int = 0
) -> list[Part]:
    """Return the content parts of blocks. See `read_block`.

    Args:
        blocks: The blocks.
        where: Path of the list.
        kinds: Types of blocks that are allowed.
        start: Index of the first block in the list.
    """
    parts: list[Part] = []
    for index, block in enumerate(blocks, start=start):
        path = f"{where}[{index}]"
        read = read_block(block, where=path, kinds=kinds)
        assert isinstance(read, ContentBlock), "kinds are types of content"
        parts += read.parts(where=path)
    return parts


def text_part(text: str) -> Part:
    """Return a content part with a text."""
    return {"type": "text", "text": text}


def _as_error(parts: Sequence[Part]) -> list[Part]:
    """Return the parts of a tool result that tell the model that the call failed."""
    if parts and parts[0]["type"] == "text":
        return [text_part(f"Error: {parts[0]['text']}"), *parts[1:]]
    return [text_part("Error:"), *parts]
