"""Agent on the plain OpenAI client. The code is independent of the training of its model.

Run as a program, it reads its row from standard input and the address of its model from OPENAI_BASE_URL.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


async def solve(row: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> None:
    """Answer the question of one row."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        await converse(client, row["raw_prompt"])


async def converse(client: openai.AsyncOpenAI, messages: list[Any]) -> None:
    """Call the model and run its tool calls until the model calls no tool."""
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": _run(call.function.arguments)}
            for call in message.tool_calls
        ]
        messages = [*messages, message, *results]


def _run(arguments: str) -> str:
    try:
        factors = json.loads(arguments)
        return str(int(factors["a"]) * int(factors["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error!r}"


async def main() -> None:
    async with openai.AsyncOpenAI() as client:
        await converse(client, json.load(sys.stdin)["raw_prompt"])


if __name__ == "__main__":
    asyncio.run(main())
