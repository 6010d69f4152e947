"""The number that a solution says its answer is, as GSM8K writes it: after `####`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

MARK = "####"
_ANSWER = re.compile(MARK + r"\s*\$?(-?\$?[\d.,]+)")


def with_mark(answer: Any) -> str:
    """The answer as GSM8K's solutions end: after `####`."""
    text = str(answer).strip()
    return text if MARK in text else f"{MARK} {text}"


def read_answer(text: str) -> Decimal | None:
    """The number behind the last `####`, commas and dollar signs left out; None if there is none."""
    found = _ANSWER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
