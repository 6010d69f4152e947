"""What a chat template writes around texts, learnt once, so that it need not run again for other texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TypeAlias

from agent_loop.errors import ChatTemplateError

Write: TypeAlias = Callable[[Sequence[str]], str]
"""Runs the template: texts to what it writes with them."""

BLANK = "@text.of.a.reply@"

_SAMPLES = ("", " x\n", "\n\nx", "\"x\" 'x' \\x\\n <x> &amp; {{ x }} {% x %} ¿x? 你好", "x" * 3000)
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_BEGINNING, _END = (re.compile(rf"{name}\(\s*(?:{_LITERAL.pattern})") for name in ("startswith", "endswith"))


class FormProof:
    """Whether a template writes texts as they are, or trimmed, between constant text.

    It is tried on samples that hold every string of the template's own source: what it might look for in a text.

    Args:
        mask: Applied to each text before it is written.
        chat_template: The template's source.
    """

    def __init__(self, *, mask: Callable[[str], str], chat_template: str) -> None:
        self._mask = mask
        self._samples = [*_SAMPLES, *_samples_from(chat_template)]

    def trims(self, write: Write, *, num_texts: int) -> bool | None:
        """Whether texts are trimmed; None if neither they nor trimmed ones are written as they are."""
        holds = (trims for trims in (False, True) if self._holds(write, num_texts=num_texts, trims=trims))
        return next(holds, None)

    def written(self, text: str, *, trims: bool) -> str:
        """A text as it stands in the form."""
        text = self._mask(text)
        return text.strip() if trims else text

    def _holds(self, write: Write, *, num_texts: int, trims: bool) -> bool:
        try:
            form = form_of(write, num_texts=num_texts)
            return form is not None and all(
                self.written(sample, trims=trims).join(form) == write([sample] * num_texts)
                for sample in self._samples
            )
        except ChatTemplateError:
            return False


def form_of(write: Write, *, num_texts: int) -> list[str] | None:
    """What is written before, between and behind the texts; None if a text is left out or written twice."""
    parts = write([BLANK] * num_texts).split(BLANK)
    return parts if len(parts) == num_texts + 1 else None


def _samples_from(chat_template: str) -> Iterator[str]:
    """Texts that hold, begin with and end with each string of the template's source."""
    literals = _literals(_LITERAL, chat_template)
    yield "x".join(["", *literals, ""])
    for literal in literals:
        yield literal
        yield f"{literal}x"
        yield f"x{literal}"
    for beginning, end in product(_literals(_BEGINNING, chat_template), _literals(_END, chat_template)):
        yield f"{beginning}x{end}"


def _literals(pattern: re.Pattern[str], chat_template: str) -> list[str]:
    found = [single or double for single, double in pattern.findall(chat_template)]
    return [re.sub(r"\\n", "\n", literal) for literal in dict.fromkeys(found) if literal]
