"""Validation against untrusted JSON schemas, within a bounded number of steps.

A schema from an MCP server or a client may contain patterns that backtrack without limit, references that form cycles
or point to other machines, and combinations that double with each level. None of them can block the event loop.

Patterns are translated from the syntax of ECMA-262 to that of RE2, which neither backtracks nor recurses. RE2 has no
look-around and no back-references, so patterns that use them are refused.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, cast

from jsonschema import Draft202012Validator, FormatChecker, validators
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

MAX_COUNT = 1000
"""RE2's limit on repetition counts. A larger count is enforced up to this value."""
MAX_MEMORY = 4 << 20
"""Maximum size of a compiled pattern in bytes."""
CELLS_PER_STEP = 400
"""Pairs of pattern instruction and text character that count as one step.

RE2 takes up to 14 ns per pair, which makes a step about 5 microseconds: as long as one keyword of a schema takes."""

_TOKEN = re.compile(
    r"\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\u(?P<unit>[0-9a-fA-F]{4})"
    r"|(?P<script>\\[pP]\{(?:Script|sc)=)|(?P<escape>\\.)"
    r"|(?P<least>\{\d+)(?P<most>,\d*)?\}|(?P<bracket>[\[\]])|(?P<other>.)",
    re.DOTALL,
)


class PatternRefused(ValueError):
    """The pattern is invalid, or cannot be matched in bounded time."""


class Pattern:
    """Compiled pattern that may match anywhere in a text, as in JSON schemas.

    Raises:
        PatternRefused: RE2 does not accept the pattern.
    """

    def __init__(self, pattern: str) -> None:
        re2: Any = import_module("re2")  # it has no type hints
        options: Any = re2.Options()
        options.max_mem, options.log_errors, options.never_capture = MAX_MEMORY, False, True
        try:
            self._compiled: Any = re2.compile(_translated(pattern), options)
        except re2.error as error:
            raise PatternRefused(_message(error)) from None
        except UnicodeEncodeError:
            raise PatternRefused("it contains half of a surrogate pair") from None
        self._size = int(self._compiled.programsize)

    def steps(self, text: str) -> int:
        """Return the longest duration of a search, in steps of about 5 microseconds."""
        return self._size * len(text) // CELLS_PER_STEP

    def is_in(self, text: str) -> bool:
        """Return whether the pattern matches anywhere in the text."""
        if not text.isascii():
            text = text.encode(
                errors="replace"
            ).decode()  # RE2 reads UTF-8, which has no half surrogate pairs
        return self._compiled.search(text) is not None


@lru_cache(maxsize=4096)
def pattern_of(pattern: str) -> Pattern:
    """Return the compiled pattern.

    Raises:
        PatternRefused: RE2 does not accept the pattern.
    """
    return Pattern(pattern)


def _message(error: Exception) -> str:
    reason: Any = error.args[0] if error.args else ""
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)


def _translated(pattern: str) -> str:
    """Rewrite ECMA-262 syntax that differs in RE2: code points, script names, brackets in classes, large counts."""
    parts: list[str] = []
    is_in_class = False
    for token in _TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token[0]
        if kind == "code" or kind == "unit":
            text = rf"\x{{{token[kind]}}}"
        elif kind == "script":
            text = text.partition("{")[0] + "{"
        elif kind in ("least", "most") and not is_in_class:
            text = _count(token)
        elif kind == "bracket" and is_in_class and text == "[":
            text = r"\["
        elif kind == "bracket":
            is_in_class = text == "["
        parts.append(text)
    return "".join(parts)


def _count(token: re.Match[str]) -> str:
    least, most = int(token["least"][1:]), token["most"]
    if most is None:
        return f"{{{least}}}" if least <= MAX_COUNT else f"{{{MAX_COUNT},}}"
    if most == "," or int(most[1:]) > MAX_COUNT:
        return f"{{{min(least, MAX_COUNT)},}}"
    return token[0]


MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_STEPS = 50_000
"""Maximum number of keywords applied to one value. That many take about a quarter of a second."""

_SINGLE = (
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_REFERENCES = ("$ref", "$dynamicRef")


class InvalidSchema(ValueError):
    """The schema cannot be used. The message names the location and the reason."""


class TooManySteps(Exception):
    """Validating a value against a schema takes too many steps."""


def check_json_schema(schema: Any) -> None:
    """Check that a value is a valid JSON schema within the size limits. Its patterns are not checked.

    Raises:
        InvalidSchema: The value is not a valid schema, or it is too large or nested too deeply.
    """
    _check_size(schema)
    try:
        Draft202012Validator.check_schema(schema, format_checker=FormatChecker(formats=()))
    except SchemaError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        raise InvalidSchema(f"{place or 'its root'}: {error.message}") from None
    except RecursionError:
        raise InvalidSchema("it is nested too deeply") from None


def check_applicable(schema: Mapping[str, Any]) -> None:
    """Check that values can be validated against a schema that has passed `check_json_schema`.

    Raises:
        InvalidSchema: A reference points outside the schema or forms a cycle, or a pattern cannot be matched in
            bounded time.
    """
    parts = [*_parts(schema)]
    for part in parts:
        for pattern in _patterns(part):
            try:
                pattern_of(pattern)
            except PatternRefused as error:
                raise InvalidSchema(
                    f"the pattern {_shortened(pattern)} cannot be matched in bounded time ({error}); rewrite it "
                    "without look-around and back-references, or leave it out"
                ) from None
    if any("unevaluatedProperties" in p for p in parts) and any("patternProperties" in p for p in parts):
        raise InvalidSchema(
            "it has both unevaluatedProperties and patternProperties; write additionalProperties for the former"
        )
    try:
        BoundedValidator(schema).find_errors({})
    except (RecursionError, TooManySteps):
        raise InvalidSchema(
            "a $ref in it refers back to itself; make each $ref refer to a part below it"
        ) from None


class BoundedValidator:
    """Validator for one schema. It fetches nothing and takes at most `MAX_STEPS` per value."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        # A `$schema` in a part would make jsonschema use another validator for that part.
        self._validator: _Validator = _Bounded(_without_dialects(schema), registry=Registry[Any]())

    def find_errors(self, value: Any) -> list[ValidationError]:
        """Return the validation errors of a value.

        Raises:
            TooManySteps: The validation exceeds `MAX_STEPS`.
            RecursionError: The value is nested too deeply.
            Unresolvable: A reference has no target. `check_applicable` finds all except those relative to an inner
                `$id`.
            PatternRefused: A pattern cannot be matched. `check_applicable` finds all under known keywords.
        """
        _steps.left = MAX_STEPS
        return list(self._validator.iter_errors(value))


class _Validator(Protocol):
    def iter_errors(self, instance: Any) -> Iterable[ValidationError]: ...


class _Steps(threading.local):
    left = 0

    def take(self, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise TooManySteps


_steps = _Steps()


def _matches(pattern: str, text: str) -> bool:
    compiled = pattern_of(pattern)
    _steps.take(compiled.steps(text))
    return compiled.is_in(text)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{_shortened(instance)} does not match {_shortened(pattern)}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, part in patterns.items():
        for name, value in cast(dict[str, Any], instance).items():
            if _matches(pattern, name):
                yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, part: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known: Mapping[str, Any] = schema.get("properties", {})
    patterns: Mapping[str, Any] = schema.get("patternProperties", {})
    for name, value in cast(dict[str, Any], instance).items():
        if name in known or any(_matches(pattern, name) for pattern in patterns):
            continue
        if isinstance(part, dict):
            yield from validator.descend(value, part, path=name)
        elif not part:
            allowed = f"; a name has to match {' or '.join(map(_shortened, patterns))}" if patterns else ""
            yield ValidationError(f"the name {_shortened(name)} is not allowed{allowed}")


def _unique_items(validator: Any, is_unique: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if is_unique and isinstance(instance, list):
        items = cast(list[Any], instance)
        _steps.take(len(items))
        if len({_hashable(item) for item in items}) < len(items):
            yield ValidationError(f"{_shortened(items)} has an item twice")


def _hashable(value: Any) -> Any:
    """Return a hashable form of a JSON value. Equal values have equal forms; in JSON, 1 equals 1.0 but not true."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("list", *map(_hashable, cast(list[Any], value)))
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return ("dict", frozenset((name, _hashable(inner)) for name, inner in pairs))
    return value


def _counted(apply: Callable[..., Any]) -> Callable[..., Any]:
    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _steps.take()
        return apply(validator, value, instance, schema)

    return counted


_KEYWORDS: Mapping[str, Callable[..., Any]] = {
    **cast(Mapping[str, Callable[..., Any]], Draft202012Validator.VALIDATORS),
    "additionalProperties": _additional_properties,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "uniqueItems": _unique_items,
}
_Bounded: Any = cast(Any, validators).extend(
    Draft202012Validator, {keyword: _counted(apply) for keyword, apply in _KEYWORDS.items()}
)


def _check_size(schema: Any) -> None:
    """Check the size of a schema."""
    level, num_nodes = [schema], 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                inner += cast(Mapping[str, Any], node).values()
            elif isinstance(node, (list, tuple)):
                inner += cast(list[Any], node)
        num_nodes += len(inner)
        if num_nodes > MAX_NODES:
            raise InvalidSchema(f"it has more than {MAX_NODES} parts; write a smaller one")
        if not inner:
            return
        level = inner
    raise InvalidSchema(f"it is nested more than {MAX_DEPTH} levels deep; write a flatter one")


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and every schema in it, including the targets of references."""
    resolver = Registry[Any]().resolver_with_root(DRAFT202012.create_resource(schema))
    pending: list[Any] = [schema]
    seen: set[int] = set()
    while pending:
        node = pending.pop()
        if not isinstance(node, Mapping) or id(cast(Any, node)) in seen:
            continue
        part = cast(Mapping[str, Any], node)
        seen.add(id(part))
        yield part
        pending += [part[key] for key in _SINGLE if key in part]
        for key in _LISTED:
            pending += part.get(key, ())
        for key in _NAMED:
            pending += part.get(key, {}).values()
        for key in _REFERENCES:
            if key in part:
                try:
                    pending.append(resolver.lookup(str(part[key])).contents)
                except Unresolvable:
                    raise InvalidSchema(
                        f"it refers to {part[key]!r}, which it does not contain; add that schema to its $defs"
                    ) from None


def _patterns(part: Mapping[str, Any]) -> Iterator[str]:
    if "pattern" in part:
        yield part["pattern"]
    yield from part.get("patternProperties", ())


def _without_dialects(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {
            key: _without_dialects(value)
            for key, value in cast(Mapping[str, Any], node).items()
            if key != "$schema" or not isinstance(value, str)
        }
    return [_without_dialects(item) for item in cast(list[Any], node)] if isinstance(node, list) else node


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
