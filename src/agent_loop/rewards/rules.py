"""Rules that score the text of a solution against the ground truth of a row."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from typing import Any, cast

from agent_loop.errors import RewardError
from agent_loop.rewards.math_answers import answer_line, boxed, is_equal, last_number, number_after_mark

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
