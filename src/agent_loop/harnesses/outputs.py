"""Reads what agents print."""

from __future__ import annotations

import json
from typing import Any, cast


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the lines that are JSON objects, in their order. Other lines, such as warnings, are left out."""
    objects: list[dict[str, Any]] = []
    for line in text.split("\n"):
        if line.startswith("{"):
            try:
                value: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                objects.append(cast(dict[str, Any], value))
    return objects


def last_json_object(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object; None if there is no such line."""
    objects = json_lines(text)
    return objects[-1] if objects else None
