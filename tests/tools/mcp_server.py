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

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
app = MCPServer("notes", log_level="CRITICAL")
notes: list[str] = []


@app.tool(annotations=ToolAnnotations(read_only_hint=True))
async def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


@app.tool()
async def note(text: str) -> str:
    """Keeps a note and tells how many there are."""
    notes.append(text)
    return f"{len(notes)} notes"


@app.tool()
async def whereabouts() -> str:
    """Names the process."""
    return f"{os.getpid()} {os.environ.get('SECRET', '')}"


@app.tool()
async def die() -> str:
    """Ends the process."""
    os._exit(3)


@app.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@app.tool()
async def fail() -> CallToolResult:
    """Says that it did not work."""
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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        app.run("stdio")
