"""Encoding of long texts in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_loop.chat.multimodal import Encoded
from agent_loop.runtime.threads import run_in_thread
from agent_loop.types import Message

LONG_CHARACTERS = 50_000
"""Number of characters from which encoding takes milliseconds; starting a thread takes a tenth of a millisecond."""


async def encoded_off_loop(messages: Sequence[Message], encode: Callable[[], Encoded]) -> Encoded:
    """Return the result of `encode`, which runs in a thread if the messages are long.

    Only `tiktoken` releases the interpreter's lock, so that the event loop can run; `tokenizers` holds the lock.
    """
    num_characters = 0
    for message in messages:
        text = message.get("content")
        num_characters += len(text) if isinstance(text, str) else 0
    return encode() if num_characters < LONG_CHARACTERS else await run_in_thread(encode)
