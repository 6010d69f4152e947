"""A server made with the official SDK, for the tests: over standard input and output, or HTTP on the given port."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from mcp.server import MCPServer
from mcp.types import (
    AudioContent,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import BaseModel

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
app = MCPServer("notes", log_level="CRITICAL")
notes: list[str] = []


@app.tool(annotations=ToolAnnotations(read_only_hint=True))
async def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@app.tool()
async def note(text: str) -> str:
    """Keep a note and return the number of notes."""
    notes.append(text)
    return f"{len(notes)} notes"


@app.tool()
async def whereabouts() -> str:
    """Names the process."""
    return f"{os.getpid()} {os.environ.get('SECRET', '')}"


@app.tool()
async def die() -> str:
    """End the process."""
    os._exit(3)


@app.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@app.tool()
async def fail() -> CallToolResult:
    """Report an error."""
    return CallToolResult(content=[TextContent(text="no luck today")], is_error=True)


@app.tool()
async def show() -> CallToolResult:
    """Answers with all there is."""
    content: list[Any] = [
        TextContent(text="a pixel:"),
        ImageContent(data=PIXEL, mime_type="image/png"),
        EmbeddedResource(resource=TextResourceContents(uri="notes://1", text="a note")),
        ResourceLink(name="the rest", uri="notes://rest"),
        AudioContent(data="", mime_type="audio/wav"),
    ]
    return CallToolResult(content=content)


@app.tool()
async def slow_to_check() -> CallToolResult:
    """Return a result that violates its output schema, whose pattern takes a backtracking engine forever."""
    return CallToolResult(content=[TextContent(text="done")], structured_content={"x": "a" * 60 + "!"})


class Anything(BaseModel, extra="allow"):
    """What the server takes for its output schema."""


_metadata = app._tool_manager.get_tool("slow_to_check").fn_metadata  # type: ignore
_metadata.output_model = Anything
_metadata.output_schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        app.run("stdio")
