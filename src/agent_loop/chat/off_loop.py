"""Encoding beside the event loop, where it takes long enough to be worth a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_loop.chat.multimodal import Encoded
from agent_loop.runtime.threads import run_in_thread
from agent_loop.types import Message

LONG_CHARACTERS = 50_000
"""From here on, encoding takes milliseconds, where a thread takes a tenth of one."""


async def encoded_off_loop(messages: Sequence[Message], encode: Callable[[], Encoded]) -> Encoded:
    """What `encode` makes of these messages; it runs in a thread if they are long.

    Only `tiktoken` lets the event loop go on meanwhile: `tokenizers` keeps the interpreter's lock.
    """
    num_characters = 0
    for message in messages:
        text = message.get("content")
        num_characters += len(text) if isinstance(text, str) else 0
    return encode() if num_characters < LONG_CHARACTERS else await run_in_thread(encode)
