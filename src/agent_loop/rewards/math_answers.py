"""Extraction and comparison of the final answers of mathematical solutions."""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
_FINAL = re.compile(rf"####\s*({NUMBER})")
_NUMBERS = re.compile(NUMBER)
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_ROOT = re.compile(r"\\sqrt\s*(\w)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[ ,;:!]|\\left|\\right|\\displaystyle|\\big[gl]?|\\quad|\\qquad|~")
_UNIT = re.compile(r"(?<=\d)(?:\\%|%|\^\\circ|\^\{\\circ\}|\\degree|°)$")
_WORD_AFTER_NUMBER = re.compile(r"(-?[\d,./]+)\s+[A-Za-z ]+$")
_PLAIN_FRACTION = re.compile(r"(-?)\(?(-?\d+(?:\.\d+)?)\)?/\(?(\d+(?:\.\d+)?)\)?")


def number_after_mark(text: str) -> Fraction | None:
    """Return the number after the last `####`, as the solutions of GSM8K end; None if there is none."""
    found = _FINAL.findall(text)
    return _number(found[-1]) if found else None


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text; None if there is none."""
    found = _NUMBERS.findall(text)
    return _number(found[-1]) if found else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` in a text; None if there is none, or if it is not closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    at = text.index("{", start)
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if not depth:
            return text[at + 1 : end].strip()
    return None


def answer_line(text: str) -> str | None:
    """Return the text after the last `Answer:`; None if there is none."""
    found = _ANSWER_LINE.findall(text)
    return found[-1].strip().strip("$").strip() if found else None


def is_equal(given: str, truth: str) -> bool:
    r"""Return whether two answers are the same number, or the same expression up to notation.

    Spaces, `\text`, `\left`, kinds of fractions, thousands separators, dollar and percent signs, degrees and words
    after a number do not count. Expressions are not simplified: `2\sqrt{2}` and `\sqrt{8}` differ.
    """
    first, second = _normalized(given), _normalized(truth)
    if first == second:
        return bool(first)
    numbers = _number(first), _number(second)
    return None not in numbers and numbers[0] == numbers[1]


def _normalized(text: str) -> str:
    text = text.strip().strip("$").rstrip(".").strip()
    for _ in range(text.count("{") + 1):
        text = _FRACTION.sub(lambda m: f"({m[1] or m[2] or ''})/({m[3] or m[4] or ''})", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _SPACING.sub("", _TEXT.sub(r" \1", text)).replace("\\$", "").replace("$", "").strip()
    text = _WORD_AFTER_NUMBER.sub(r"\1", text)
    text = _UNIT.sub("", text)
    if re.fullmatch(r"[a-zA-Z]\w*\s*=.*", text) and text.count("=") == 1:
        text = text.partition("=")[2]
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    return re.sub(r"\((\w+)\)/\((\w+)\)", r"\1/\2", text.replace(" ", "")).lower()


def _number(text: str) -> Fraction | None:
    text = text.replace(",", "").replace("$", "")
    found = _PLAIN_FRACTION.fullmatch(text)
    try:
        if found is None:
            return Fraction(text)
        value = Fraction(found[2]) / Fraction(found[3])
        return -value if found[1] else value
    except (ValueError, ZeroDivisionError):
        return None
