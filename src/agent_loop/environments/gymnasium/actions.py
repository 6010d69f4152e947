"""Parser of the action in a model's answer to an environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_error, describe_value, one_line


class InvalidAction(Exception):
    """Raised when a text names no action of the space. The message can be shown to the model."""


class ActionReader:
    """Converts text to a member of a Gymnasium space.

    Args:
        words: Action values by name; names are case-insensitive. If empty, the text is the action itself: taken
            literally for a `Text` space, parsed as JSON for any other.
        pattern: A case-insensitive regular expression that finds the action. Its last match counts: the first group
            if there is one, or the whole match. None takes the whole text.

    Raises:
        ConfigError: The pattern is not a valid regular expression.
    """

    def __init__(self, *, words: Mapping[str, Any], pattern: str | None) -> None:
        self._words = {word.casefold(): value for word, value in words.items()}
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.IGNORECASE | re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"action_pattern is {pattern!r}, which is not a valid regular expression: {error}"
            ) from error

    def read(self, text: str, space: Any) -> Any:
        """Return the action that `text` names.

        Raises:
            InvalidAction: The text names no action of `space`.
        """
        action = self._value_of(self._matched_text(text), space)
        if isinstance(action, bool) or not space.contains(action):  # (a bool passes as an integer otherwise)
            raise InvalidAction(f"{describe_value(action)} is not in {space}")
        return action

    def _matched_text(self, text: str) -> str:
        if self._pattern is None:
            return text.strip()
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise InvalidAction(f"nothing in the answer matches {self._pattern.pattern}")
        groups = matches[-1].groups()
        return str(groups[0] if groups and groups[0] is not None else matches[-1][0]).strip()

    def _value_of(self, text: str, space: Any) -> Any:
        if self._words:
            if text.casefold() not in self._words:
                raise InvalidAction(
                    f"{one_line(text, max_length=80)!r} is not one of the actions {', '.join(self._words)}"
                )
            value = self._words[text.casefold()]
        elif type(space).__name__ == "Text":
            return text
        else:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidAction(
                    f"{one_line(text, max_length=80)!r} is not a JSON value of {space}"
                ) from error
        return _member(value, space)


def _member(value: Any, space: Any) -> Any:
    """Convert a value from JSON or YAML to the types of its space."""
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
    """Convert numbers to an array of the space's dtype.

    Raises:
        InvalidAction: The value is not numeric, or would be rounded.
    """
    try:
        exact = np.asarray(value)
        array = np.asarray(value, dtype=space.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidAction(f"{describe_value(value)} is not in {space}: {describe_error(error)}") from error
    is_rounded = array.dtype.kind in "iu" and not np.array_equal(array, exact)
    if exact.dtype.kind not in "biuf" or is_rounded:
        raise InvalidAction(f"{describe_value(value)} is not in {space}")
    return array
