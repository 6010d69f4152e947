"""Reading a completion: text, reasoning, calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from agent_loop.chat.parsers.walking import Thought
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.registries import warn_if_replaced
from agent_loop.types import ParsedCompletion

ParserT = TypeVar("ParserT", bound="type[ToolParser]")


class ToolParser(ABC):
    """Reads the calls out of a completion's text. Stateless; one object serves all trajectories.

    What every parser promises: it never raises; what is meant as a call and cannot be read, is not closed, or holds no
    object of arguments comes back as a `MalformedCall` in its place; nothing inside reasoning is a call; text around
    calls is kept; the time is linear in the text.

    A parser of your own: subclass, decorate with `@ToolParser.register("name")`, and name it in
    `rollout.multi_turn.format`.
    """

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    call_start: str | None = None
    """The text that opens a call, where the format has one that means nothing else."""

    reads_end_tokens: ClassVar[bool] = False
    """The completion is given with the tokens that end the turn; else without them."""

    thoughts: ClassVar[tuple[Thought, ...]] = ()
    """How reasoning is marked, where a generation prompt may open it."""

    @abstractmethod
    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        """Reads a completion.

        Args:
            text: The completion, control tokens of the format included.
            tools: OpenAI function schemas. Formats that write strings without quotes take the types from them; the
                others have no use for them.
        """

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        """Whether a chat template's text is one of this format. No two formats that ship claim the same template."""
        return False

    @classmethod
    def register(cls, name: str) -> Callable[[ParserT], ParserT]:
        """Register a parser under a name. A name that is taken goes to the new class, with a warning."""

        def decorate(parser: ParserT) -> ParserT:
            warn_if_replaced(cls._registry.get(name), parser, what=f"tool parser {name!r}")
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

    @classmethod
    def registered(cls) -> Mapping[str, type[ToolParser]]:
        """The known parsers by name."""
        return dict(cls._registry)
