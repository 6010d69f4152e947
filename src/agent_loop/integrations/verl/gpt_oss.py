"""Texts of tool replies in the format of gpt-oss, for loops that write them by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """Return the message of a tool's reply to the assistant."""
    header = f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>"
    return f"{header}{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """Return the text with the beginning of an assistant message after it."""
    return f"{message_content}<|start|>assistant"


def build_gpt_oss_tool_response_text(
    messages: Sequence[Mapping[str, Any]], tool_call_names: Sequence[str]
) -> str:
    """Return the messages of several replies, and the beginning of an assistant message."""
    replies = [
        format_gpt_oss_tool_response_manually(str(message["content"]), name)
        for message, name in zip(messages, tool_call_names, strict=True)
    ]
    return add_generation_prompt_for_gpt_oss("".join(replies))
