"""Validation against JSON schemas of MCP servers, clients and files.

No schema makes this process fetch another document. No pattern blocks the event loop: RE2 matches in time linear in the
text. RE2 has no look-around and no back-references, and a pattern that uses them is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, cast

from jsonschema import Draft202012Validator, FormatChecker, validators
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable


class InvalidSchema(ValueError):
    """The schema cannot be used. The message says why."""


def check_json_schema(schema: Any) -> None:
    """Check that a value is a valid JSON schema. References in it are not followed."""
    try:
        Draft202012Validator.check_schema(schema, format_checker=FormatChecker(formats=()))
    except SchemaError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        raise InvalidSchema(f"{place or 'its root'}: {error.message}") from None
    except RecursionError:
        raise InvalidSchema("it is nested too deeply") from None


class SchemaValidator:
    """Validator of values against one valid schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._validator: Any = _Validator(schema, registry=Registry[Any]())

    def find_errors(self, value: Any) -> list[ValidationError]:
        """Return the validation errors of a value."""
        try:
            return list(self._validator.iter_errors(value))
        except RecursionError:
            raise InvalidSchema("it is nested too deeply") from None
        except (OverflowError, Unresolvable) as error:
            raise InvalidSchema(str(error)) from error


def _matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches anywhere in a text; True if RE2 cannot match it."""
    compiled = _compiled(pattern)
    return compiled is None or compiled.search(text.encode(errors="replace")) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> Any:
    """Compile a pattern of a JSON schema, in which ECMA-262 writes characters as `\\u4e00`."""
    re2: Any = import_module("re2")  # it has no type hints
    options: Any = re2.Options()
    options.log_errors, options.never_capture = False, True
    try:
        return re2.compile(re.sub(r"\\u([0-9a-fA-F]{4})", r"\\x{\1}", pattern).encode(), options)
    except (re2.error, UnicodeEncodeError):
        return None


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, part in patterns.items():
            for name, value in cast(dict[str, Any], instance).items():
                if _matches(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, part: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        patterns: Mapping[str, Any] = schema.get("patternProperties", {})
        for name, value in cast(dict[str, Any], instance).items():
            if name in schema.get("properties", {}) or any(_matches(each, name) for each in patterns):
                continue
            if isinstance(part, dict):
                yield from validator.descend(value, part, path=name)
            elif not part:
                yield ValidationError(f"the name {name!r} is not allowed")


_Validator: Any = cast(Any, validators).extend(
    Draft202012Validator,
    {
        "additionalProperties": _additional_properties,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
    },
)
