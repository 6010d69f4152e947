"""Tool parsers with verl's interface, and texts of tool replies in the format of gpt-oss."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from agent_loop.chat import parsers
from agent_loop.registries import warn_if_replaced

ParserT = TypeVar("ParserT", bound="type[ToolParser]")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Well-formed tool call."""

    name: str
    arguments: str
    """Arguments as a JSON object."""


class ToolParser(ABC):
    """Parser of the tool calls in the tokens of a completion."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    async def extract_tool_calls(self, responses_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        """Return the text around the calls, and the calls. Malformed calls are skipped."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Return the parser with a name: a parser registered here, or a parser of `agent_loop.ToolParser`."""
        if name in cls._registry:
            return cls._registry[name](tokenizer)
        return ShippedToolParser(tokenizer, parsers.ToolParser.get(name))

    @classmethod
    def register(cls, name: str) -> Callable[[ParserT], ParserT]:
        """Register a parser under a name. A name that is taken goes to the new class, with a warning."""

        def decorate(parser: ParserT) -> ParserT:
            known = cls._registry.get(name) or parsers.ToolParser.registered().get(name)
            warn_if_replaced(known, parser, what=f"tool parser {name!r}")
            cls._registry[name] = parser
            return parser

        return decorate


class ShippedToolParser(ToolParser):
    """Adapter of a parser of `agent_loop.ToolParser`."""

    def __init__(self, tokenizer: Any, parser: parsers.ToolParser) -> None:
        super().__init__(tokenizer)
        self._parser = parser

    async def extract_tool_calls(self, responses_ids: Sequence[int]) -> tuple[str, list[FunctionCall]]:
        text: str = self.tokenizer.decode(list(responses_ids))
        if not self._parser.reads_end_tokens:
            text = text.removesuffix(self.tokenizer.eos_token or "")
        parsed = self._parser.parse(text)
        calls = [
            FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False))
            for call in parsed.tool_calls
        ]
        return parsed.content, calls


class HermesToolParser(ShippedToolParser):
    """Parser of Hermes tool calls."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, parsers.HermesToolParser())


class CallsOnlyToolParser:
    """Adapter with the interface of verl's first versions, which returns the calls without the text."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser

    async def extract_tool_calls(self, responses_ids: Sequence[int]) -> list[FunctionCall]:
        """Return the well-formed calls."""
        _, calls = await self._parser.extract_tool_calls(responses_ids)
        return calls


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
