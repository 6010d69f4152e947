"""Reads an environment's action out of what the model said."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_error, describe_value, one_line


class NoAction(Exception):
    """The text names no action of the space; the message says why, in words that the model may be answered with."""


class ActionReader:
    """Turns text into a member of a Gymnasium space.

    Args:
        words: Action values by the words for them, in any case; empty if the text is the value itself: as it is for a
            `Text` space, else in JSON.
        pattern: A regular expression, in any case, whose last match counts: its first group, or all of it. None takes
            the whole text.

    Raises:
        ConfigError: The pattern is no regular expression.
    """

    def __init__(self, *, words: Mapping[str, Any], pattern: str | None) -> None:
        self._words = {word.casefold(): value for word, value in words.items()}
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.IGNORECASE | re.DOTALL)
        except re.error as error:
            raise ConfigError(f"action_pattern is {pattern!r}, no regular expression: {error}") from error

    def read(self, text: str, space: Any) -> Any:
        """The action that the text names.

        Raises:
            NoAction: It names none.
        """
        said = self._matched(text)
        action = self._value_of(said, space)
        if isinstance(action, bool) or not space.contains(action):  # (`true` is no number)
            raise NoAction(f"{describe_value(action)} is not in {space}")
        return action

    def _matched(self, text: str) -> str:
        if self._pattern is None:
            return text.strip()
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise NoAction(f"nothing in the answer has the form {self._pattern.pattern}")
        groups = matches[-1].groups()
        return str(groups[0] if groups and groups[0] is not None else matches[-1][0]).strip()

    def _value_of(self, said: str, space: Any) -> Any:
        if self._words:
            if said.casefold() not in self._words:
                raise NoAction(
                    f"{one_line(said, max_length=80)!r} is none of the actions {', '.join(self._words)}"
                )
            value = self._words[said.casefold()]
        elif type(space).__name__ == "Text":
            return said
        else:
            try:
                value = json.loads(said)
            except (ValueError, RecursionError) as error:
                raise NoAction(f"{one_line(said, max_length=80)!r} is no value of {space} in JSON") from error
        return _member(value, space)


def _member(value: Any, space: Any) -> Any:
    """A value as it came from JSON or YAML, in the types of its space."""
    kind = type(space).__name__
    if kind == "Dict" and isinstance(value, dict):
        values = cast(dict[str, Any], value)
        return {
            key: _member(inner, space[key]) if key in space.spaces else inner for key, inner in values.items()
        }
    if isinstance(value, list):
        items = cast(list[Any], value)
        if kind == "Tuple" and len(items) == len(space):
            return tuple(map(_member, items, space))
        if kind == "Sequence":
            return tuple(_member(item, space.feature_space) for item in items)
    return _array(value, space) if kind == "Box" or isinstance(value, list) else value


def _array(value: Any, space: Any) -> Any:
    """Numbers as an array, none of them rounded."""
    try:
        exact = np.asarray(value)
        array = np.asarray(value, dtype=space.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise NoAction(f"{describe_value(value)} is not in {space}: {describe_error(error)}") from error
    is_rounded = array.dtype.kind in "iu" and not np.array_equal(array, exact)
    if exact.dtype.kind not in "biuf" or is_rounded:
        raise NoAction(f"{describe_value(value)} is not in {space}")
    return array
