"""Reading a completion: text, reasoning, calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.types import ParsedCompletion

ParserT = TypeVar("ParserT", bound="type[ToolParser]")


class ToolParser(ABC):
    """Reads the calls out of a completion's text. Stateless; one object serves all trajectories.

    A parser of your own: subclass, decorate with `@ToolParser.register("name")`, and name it in
    `rollout.multi_turn.format`.
    """

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    call_start: str | None = None
    """The text that opens a call, where the format has one."""

    @abstractmethod
    def parse(self, text: str) -> ParsedCompletion:
        """Reads a completion, control tokens of the format included. Never raises: what is meant as a call and
        cannot be read comes back as a `MalformedCall`."""

    @classmethod
    def register(cls, name: str) -> Callable[[ParserT], ParserT]:
        """Makes a parser known by a name."""

        def decorate(parser: ParserT) -> ParserT:
            cls._registry[name] = parser
            return parser

        return decorate

    @classmethod
    def get(cls, name: str) -> ToolParser:
        """The parser of that name.

        Raises:
            ConfigError: There is none.
        """
        if name not in cls._registry:
            raise ConfigError(
                f"rollout.multi_turn.format is {name!r}: unknown tool parser{did_you_mean(name, cls._registry)}"
            )
        return cls._registry[name]()


def split_reasoning(
    text: str, *, opening: str = "<think>", closing: str = "</think>"
) -> tuple[str | None, str]:
    """Reasoning and the rest. What follows an opening tag that is never closed is all reasoning; a closing tag without
    an opening one ends reasoning that the generation prompt opened."""
    before, closed, after = text.rpartition(closing)
    if closed:
        return before.replace(opening, "", 1).strip("\n"), after
    before, opened, after = text.partition(opening)
    if opened:
        return after.strip("\n"), before
    return None, text
