"""Check that a chat template copies the text of messages between constant text, so that it need not run again.

docs/design/011-cached-renders.md says what the check establishes and what it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Literal, TypeAlias

from agent_loop.errors import ChatTemplateError

RenderTexts: TypeAlias = Callable[[Sequence[str]], str]
"""Runs the template on messages with these texts."""

CopyRule: TypeAlias = Literal["verbatim", "stripped"]
"""How a template copies the text of messages: unchanged, or without the white space around it."""

_RULES: tuple[CopyRule, ...] = ("verbatim", "stripped")

SLOT = "@text.of.a.message@"
"""Marks the place of a text in a rendered template."""

_SAMPLES = ("", " x\n", "\n\nx", "\"x\" 'x' \\x\\n <x> &amp; {{ x }} {% x %} ¿x? 你好", "x" * 3000)
_PLAIN = "x"
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_PREFIX, _SUFFIX = (
    re.compile(rf"{method}\(\s*(?:{_LITERAL.pattern})") for method in ("startswith", "endswith")
)


class SlotCheck:
    """Check that a template copies texts between constant text.

    The check compares renders on sample texts. The samples contain, begin with and end with every string of the
    template's source, since a template can only search a text for strings of its source.

    Args:
        mask: Applied to each text before it is rendered.
        chat_template: Source of the template.
    """

    def __init__(self, *, mask: Callable[[str], str], chat_template: str) -> None:
        self._mask = mask
        self._samples = [*_SAMPLES, *_samples_from(chat_template)]

    def find_rule(self, render: RenderTexts, *, num_slots: int) -> CopyRule | None:
        """Return the rule that holds for all samples, or None if neither rule does or the template raises an error."""
        return next((rule for rule in _RULES if self._holds(rule, render, num_slots=num_slots)), None)

    def find_rules(self, render: RenderTexts, *, may_be_blank: Sequence[bool]) -> tuple[CopyRule, ...] | None:
        """Return one rule per slot that hold for all samples, in one slot and in all slots at once. Return None if no
        rules do or the template raises an error.

        Args:
            render: Runs the template.
            may_be_blank: Whether the text of each slot may be empty or white space, which templates treat otherwise.
        """
        try:
            parts = split_at_slots(render, num_slots=len(may_be_blank))
            if parts is None:
                return None
            samples = [(texts, render(texts)) for texts in self._combined(may_be_blank)]
        except ChatTemplateError:
            return None
        choices = product(_RULES, repeat=len(may_be_blank))
        return next((rules for rules in choices if self._hold(rules, parts, samples)), None)

    def copied(self, text: str, *, rule: CopyRule) -> str:
        """Return a text as the template would write it, still masked."""
        text = self._mask(text)
        return text.strip() if rule == "stripped" else text

    def _combined(self, may_be_blank: Sequence[bool]) -> Iterator[list[str]]:
        """Yield a text for each slot: each sample in all slots, and in one slot beside a plain text in the others."""
        slots = range(len(may_be_blank))
        for sample in self._samples:
            fits = [is_free or bool(sample.strip()) for is_free in may_be_blank]
            yield [sample if fits[slot] else _PLAIN for slot in slots]
            yield from ([sample if slot == one else _PLAIN for slot in slots] for one in slots if fits[one])

    def _hold(
        self, rules: Sequence[CopyRule], parts: Sequence[str], samples: Sequence[tuple[Sequence[str], str]]
    ) -> bool:
        for texts, rendered in samples:
            copies = [self.copied(text, rule=rule) for text, rule in zip(texts, rules, strict=True)]
            if (
                "".join([text for pair in zip(parts, [*copies, ""], strict=True) for text in pair])
                != rendered
            ):
                return False
        return True

    def _holds(self, rule: CopyRule, render: RenderTexts, *, num_slots: int) -> bool:
        try:
            parts = split_at_slots(render, num_slots=num_slots)
            return parts is not None and all(
                self.copied(sample, rule=rule).join(parts) == render([sample] * num_slots)
                for sample in self._samples
            )
        except ChatTemplateError:
            return False


def split_at_slots(render: RenderTexts, *, num_slots: int) -> list[str] | None:
    """Return the rendered text before, between and after the slots, or None if the template writes a text not exactly
    once."""
    parts = render([SLOT] * num_slots).split(SLOT)
    return parts if len(parts) == num_slots + 1 else None


def _samples_from(chat_template: str) -> Iterator[str]:
    """Yield texts that contain, begin with and end with each string of the template's source."""
    literals = _literals(_LITERAL, chat_template)
    yield "x".join(["", *literals, ""])
    for literal in literals:
        yield literal
        yield f"{literal}x"
        yield f"x{literal}"
    for prefix, suffix in product(_literals(_PREFIX, chat_template), _literals(_SUFFIX, chat_template)):
        yield f"{prefix}x{suffix}"


def _literals(pattern: re.Pattern[str], chat_template: str) -> list[str]:
    found = [single or double for single, double in pattern.findall(chat_template)]
    return [re.sub(r"\\n", "\n", literal) for literal in dict.fromkeys(found) if literal]
