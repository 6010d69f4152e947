"""Replies written without running the template again: what it puts around their text is the same each time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from agent_loop.chat.stand_ins import CallKey
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message

Write: TypeAlias = Callable[[Sequence[Message], Sequence[CallKey]], str]
"""Runs the template: replies and the calls they answer to the text of their bridge."""

BLANK = "@text.of.a.reply@"
MAX_FORMS = 512

_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})
_SAMPLES = ("", " x\n", "\n\nx", "\"x\" 'x' \\x\\n <x> &amp; {{ x }} {% x %} ¿x? 你好", "x" * 3000)
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")


class ReplyForms:
    """What a template writes around the text of replies, with blanks for the text.

    Used only where it was proved on samples that the template writes the text as it is, or trimmed. The samples hold
    every string of the template's own source: what it might look for in a text.

    Args:
        write: Runs the template.
        mask: Applied to each text before it is written.
        chat_template: The template's source.
    """

    def __init__(self, write: Write, *, mask: Callable[[str], str], chat_template: str) -> None:
        self._write = write
        self._mask = mask
        self._samples = [*_SAMPLES, *_samples_from(chat_template)]
        self._forms: dict[object, list[str] | None] = {}
        self._trims: dict[str, bool | None] = {}

    def prove(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> None:
        """Tries whether replies like these, known by the key, can be written in a form."""
        holds = (trims for trims in (False, True) if self._holds(replies, answered, trims=trims))
        self._trims[key] = next(holds, None)

    def fill(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> str | None:
        """The bridge's text; None if the template has to be run for it."""
        trims = self._trims.get(key)
        if trims is None or not all(_is_plain(reply) for reply in replies):
            return None
        fields = tuple((reply["role"], reply.get("name"), reply.get("tool_call_id")) for reply in replies)
        wanted = (key, fields, tuple(answered))
        if wanted not in self._forms:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[wanted] = self._form(replies, answered)
        form = self._forms[wanted]
        return None if form is None else self._filled(form, replies, trims=trims)

    def _holds(self, replies: Sequence[Message], answered: Sequence[CallKey], *, trims: bool) -> bool:
        try:
            form = self._form(replies, answered)
            if form is None:
                return False
            for sample in self._samples:
                tried = [{**reply, "content": sample} for reply in replies]
                if self._filled(form, tried, trims=trims) != self._write(tried, answered):
                    return False
        except ChatTemplateError:
            return False
        return True

    def _form(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> list[str] | None:
        parts = self._write([{**reply, "content": BLANK} for reply in replies], answered).split(BLANK)
        return parts if len(parts) == len(replies) + 1 else None

    def _filled(self, form: list[str], replies: Sequence[Message], *, trims: bool) -> str:
        written = [form[0]]
        for reply, after in zip(replies, form[1:], strict=True):
            text = self._mask(reply["content"])
            written += (text.strip() if trims else text, after)
        return "".join(written)


def _is_plain(reply: Message) -> bool:
    return isinstance(reply.get("content"), str) and _FIELDS.issuperset(reply)


def _samples_from(chat_template: str) -> Iterator[str]:
    """Texts that hold, begin with and end with each string of the template's source."""
    found = [single or double for single, double in _LITERAL.findall(chat_template)]
    literals = [re.sub(r"\\n", "\n", literal) for literal in dict.fromkeys(found) if literal]
    yield "x".join(["", *literals, ""])
    for literal in literals:
        yield literal
        yield f"{literal}x"
        yield f"x{literal}"
