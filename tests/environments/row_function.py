"""Function that returns rows."""

from typing import Any


def rows() -> list[dict[str, Any]]:
    return [{"prompt": "one"}]
