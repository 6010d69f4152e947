"""Rules that score the text of a solution against the ground truth of a row."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any, cast

from agent_loop.errors import RewardError

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


_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUGHT = re.compile(r"<think>.*?</think>.*\\boxed\{.*\}", re.DOTALL)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
FORMAT_SHARE = 0.1
"""Share of the reward of `geometry` that the format gives."""


def gsm8k(text: str, truth: Any, *, flexible: bool = False) -> float:
    """Return 1 if the number after the last `####` is the right one, else 0.

    Args:
        flexible: Without `####`, take the last number of the text.
    """
    found = number_after_mark(text)
    if found is None and flexible:
        found = last_number(text)
    right = number_after_mark(f"#### {truth}") if "####" not in str(truth) else number_after_mark(str(truth))
    if right is None:
        raise RewardError(f"the ground truth {truth!r} is not a number; give one")
    return float(found == right)


def math(text: str, truth: Any) -> float:
    r"""Return 1 if the last `\boxed{...}` is the right answer, else 0. Notation does not count."""
    found = boxed(text)
    return float(found is not None and is_equal(found, _single(truth)))


def math_with_penalty(text: str, truth: Any) -> dict[str, Any]:
    r"""Return the reward of DAPO: 1 for the right answer after the last `Answer:` or in `\boxed{...}`, else -1."""
    found = answer_line(text) or boxed(text) or ""
    if "\\boxed{" in found:
        found = boxed(found) or found
    is_right = is_equal(found, _single(truth))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": found}


def geometry(text: str, truth: Any) -> float:
    r"""Return 0.9 for the right `\boxed{...}`, and 0.1 for a text of thoughts and an answer."""
    is_formatted = _THOUGHT.search(text) is not None
    return (1 - FORMAT_SHARE) * math(text, truth) + FORMAT_SHARE * is_formatted


def exact_match(text: str, truth: Any) -> float:
    """Return 1 if the last `<answer>...</answer>` is one of the right answers, else 0.

    Case, punctuation and articles do not count. The right answers are a text, a list, or a mapping with `target`.
    """
    found = _TAGGED.findall(text)
    if not found:
        return 0.0
    given = truth
    if isinstance(truth, Mapping):
        given = cast(Mapping[str, Any], truth).get("target")
    targets = [given] if isinstance(given, str) else _listed(given)
    answer = _plain(found[-1])
    return float(any(_plain(str(target)) == answer for target in targets))


def _plain(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _listed(value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Collection):
        raise RewardError(f"the ground truth is {value!r}; give a text, or a list of them as `target`")
    return list(cast("Collection[Any]", value))


def _single(truth: Any) -> str:
    """Return a ground truth that may be a list of one."""
    values = [truth] if isinstance(truth, str | int | float) else _listed(truth)
    text = str(values[0]) if values else ""
    return boxed(text) or text
