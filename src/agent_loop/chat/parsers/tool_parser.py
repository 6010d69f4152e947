"""Base class of tool parsers, and their registry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from agent_loop.chat.parsers.completion_walker import (
    THINK,
    BlockReader,
    CallBlock,
    CompletionWalker,
    ReasoningMarks,
    Tools,
    find_first,
    malformed,
    skip_space,
)
from agent_loop.chat.parsers.json_calls import parse_json_call, read_body
from agent_loop.chat.parsers.untyped_values import with_integer_arguments
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.registries import construct, load_class, warn_if_replaced
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall

ParserT = TypeVar("ParserT", bound="type[ToolParser]")
FORMAT_KEY = "rollout.multi_turn.format"


class ToolParser:
    """Base class of tool parsers, which read text, reasoning and tool calls out of a completion.

    A subclass declares the marks of its format as class attributes. If each call stands between `call_start` and
    `call_end`, the subclass overrides `parse_call`, or nothing where a call is a JSON object with `name` and
    `arguments`. Other formats override `readers`, or `parse`.

    `rollout.multi_turn.format` selects the parser: by the name that `@ToolParser.register("name")` gave it, or as
    `file.py:ClassName`. A parser is stateless: one instance serves all trajectories.

    Every parser of the package keeps these promises, and so should yours. `parse` does not raise. A call that cannot
    be parsed, that is not closed, or whose arguments are not an object is returned as a `MalformedCall` in its place.
    Nothing inside reasoning is a call. Text around calls is kept. The time is linear in the length of the text.
    """

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    call_start: str = ""
    """Text that opens a call, where the format has a text that means nothing else."""

    call_end: str = ""
    """Text that closes a call. Only the default `parse` uses it. A call that begins with JSON may hold the text inside
    its strings."""

    stream_stops: ClassVar[tuple[str, ...]] = ()
    """Texts after which a call may follow. A streamed completion is held back from the first of these texts on. The
    default is `call_start`; a format without either is not streamed."""

    reasoning_marks: ClassVar[tuple[ReasoningMarks, ...]] = ()
    """Texts around reasoning: `(THINK,)` is `<think>...</think>`. A generation prompt may open reasoning with them."""

    call_ends: ClassVar[tuple[str, ...]] = ()
    """Texts that end a call and after which the turn may end. `parallel_tool_calls: false` stops there. The default is
    `call_end`; formats without either cannot stop after the first call."""

    turn_ends: ClassVar[tuple[str, ...]] = ()
    """Texts that end a turn. The default `parse` leaves one of them out at the end of the completion."""

    ignored: ClassVar[tuple[str, ...]] = ()
    """Texts of the format that the default `parse` leaves out of the content."""

    shown_by: ClassVar[tuple[str, ...]] = ()
    """Texts that together show the format in the source of a chat template. See `recognises`."""

    content_opening: ClassVar[str] = ""
    """Text with which a turn opens the model's answer, for formats with a header before it."""

    reads_end_tokens: ClassVar[bool] = False
    """Whether `parse` gets the completion with the tokens that end the turn. The default is without them."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError if a subclass neither declares its marks nor overrides `parse`."""
        super().__init_subclass__(**options)
        is_default = cls.parse is ToolParser.parse and cls.readers is ToolParser.readers
        if is_default and not (cls.call_start and cls.call_end):
            raise TypeError(f"{cls.__name__} has no call_start and call_end; set both, or override parse")

    def readers(self) -> Mapping[str, BlockReader]:
        """Return the readers of the default `parse`, by the text that opens a call."""
        return {self.call_start: self._read_block}

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        """Parse a completion.

        Args:
            text: The completion, with the control tokens of the format.
            tools: OpenAI function schemas. Formats that write strings without quotes take the types of arguments from
                the schemas; the other formats ignore the schemas.
        """
        walker = CompletionWalker(
            self.readers(), reasoning_marks=self.reasoning_marks, ignored=self.ignored, ends=self.turn_ends
        )
        return walker.read(text, tools=tools)

    def read(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        """Parse a completion. Whole floats such as `3.0` become integers where the schema of a tool says integer."""
        return with_integer_arguments(self.parse(text, tools=tools), tools=tools)

    def parse_call(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ToolCall | MalformedCall:
        """Parse one call. Called by the default `parse`.

        The default parses a JSON object with `name` and `arguments`.

        Args:
            text: The text between `call_start` and `call_end`.
            tools: See `parse`.

        Raises:
            ValueError: The call cannot be parsed. The message is the model's reply to its malformed call.
        """
        return parse_json_call(text)

    def forced_call(self, name: str | None, *, chat_template: str) -> str | None:
        """Return the text that opens a call, up to the part that the model writes; None if the format has no such text.

        `tool_choice` begins a turn with this text, so that the model can only complete the call.

        Args:
            name: Name of the tool, or None if the model chooses the tool.
            chat_template: Source of the chat template, for formats with several dialects.
        """
        return None

    @property
    def format_texts(self) -> frozenset[str]:
        """Texts with a meaning in the format. A completion that ends with one of them is parsed with it."""
        reasoning = [text for marks in self.reasoning_marks for text in (marks.opening, marks.closing)]
        return frozenset([self.call_start, *self.first_call_ends, *self.stream_stops, *reasoning])

    @property
    def first_call_ends(self) -> tuple[str, ...]:
        """Texts after which a turn with one call can be stopped; empty if the format has none."""
        return self.call_ends or ((self.call_end,) if self.call_end else ())

    @classmethod
    def recognises(cls, chat_template: str) -> bool:
        """Return whether the source of a chat template shows this format. `rollout.multi_turn.format: auto` asks every
        registered parser; no two parsers of the package recognise the same template."""
        return bool(cls.shown_by) and all(text in chat_template for text in cls.shown_by)

    @classmethod
    def register(cls, name: str) -> Callable[[ParserT], ParserT]:
        """Register a parser under a name. Registering a name again replaces the earlier class, with a warning."""

        def decorate(parser: ParserT) -> ParserT:
            warn_if_replaced(cls._registry.get(name), parser, what=f"tool parser {name!r}")
            cls._registry[name] = parser
            return parser

        return decorate

    @classmethod
    def get(cls, name: str) -> ToolParser:
        """Return a new parser.

        Args:
            name: A registered name, or a class as `file.py:ClassName` or `package.module:ClassName`.
        """
        if name in cls._registry:
            return cls._registry[name]()
        if ":" in name:
            return construct(load_class(name, base=ToolParser, key=FORMAT_KEY), where=FORMAT_KEY)
        raise ConfigError(
            f"{FORMAT_KEY} is {name!r}: unknown tool parser{did_you_mean(name, cls._registry)}; "
            "name a parser of your own as file.py:ClassName"
        )

    @classmethod
    def registered(cls) -> Mapping[str, type[ToolParser]]:
        """Return all registered parsers by name."""
        return dict(cls._registry)

    @classmethod
    def all_reasoning_texts(cls) -> frozenset[str]:
        """Return the texts around reasoning of all registered parsers."""
        marks = [marks for parser in cls._registry.values() for marks in parser.reasoning_marks]
        return frozenset(text for each in marks for text in (each.opening, each.closing))

    def _read_block(self, text: str, start: int, tools: Tools) -> CallBlock:
        reasoning = [mark for marks in self.reasoning_marks for mark in (marks.opening, marks.closing)]
        body = read_body(text, start, closings=(self.call_end,), stops=(self.call_start, *reasoning))
        if not body.is_closed:
            return CallBlock(
                (malformed(body.text, f"the call is not closed with {self.call_end}"),), body.end
            )
        try:
            call = self.parse_call(body.text, tools=tools)
        except ValueError as error:
            call = malformed(body.text, f"the call cannot be parsed: {error}")
        return CallBlock((call,), body.end)


@dataclass(frozen=True, slots=True)
class SectionMarks:
    """Texts that open and close a section and each call in it."""

    section_open: str
    section_close: str
    call_open: str
    call_close: str
    others: tuple[str, ...] = ()
    """Further texts of the format that are left out of the content."""
    reasoning: ReasoningMarks = THINK

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts after which a call may follow."""
        return (self.section_open, self.section_close, self.call_open, *self.others)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which a call without a closing ends."""
        return (*self.openings, self.call_close, self.reasoning.opening, self.reasoning.closing)


class SectionToolParser(ToolParser):
    """Base class of parsers of formats that put the calls of a turn in one section.

    A section that does not begin with a call is malformed. Complete calls count even if their section is not closed or
    they are outside of a section.
    """

    marks: ClassVar[SectionMarks]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.reasoning_marks = (cls.marks.reasoning,)
        cls.ignored = (cls.marks.section_close, *cls.marks.others)

    def readers(self) -> Mapping[str, BlockReader]:
        return {self.marks.section_open: self._read_section, self.marks.call_open: self.read_call}

    @abstractmethod
    def read_call(self, text: str, start: int, tools: Tools) -> CallBlock:
        """Read the call whose opening ends at `start`."""

    def _read_section(self, text: str, start: int, tools: Tools) -> CallBlock:
        marks = self.marks
        if text.startswith(marks.call_open, skip_space(text, start)):
            return CallBlock((), start)
        end, _ = find_first(text, start, marks.stops)
        error = f"{marks.section_open} is not followed by {marks.call_open}"
        return CallBlock((malformed(text[start:end], error),), end)
