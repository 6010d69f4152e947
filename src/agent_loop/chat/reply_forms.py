"""Replies written without running the template again: what it puts around their text is the same each time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from agent_loop.chat.encoded_form import EncodedForm
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.forms import FormProof, Write, form_of
from agent_loop.chat.last_used import LastUsed
from agent_loop.chat.stand_ins import CallKey
from agent_loop.types import IntArray, Message

WriteReplies: TypeAlias = Callable[[Sequence[Message], Sequence[CallKey]], str]
"""Runs the template: replies and the calls they answer to the text of their bridge."""

MAX_FORMS = 512
MAX_SHAPES = 16
"""So many orders of roles are tried."""

_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})
_READS_IDS = re.compile(r"\bid\b|tool_call_id")
_OTHER_IDS = ("", "call_0aZ-9:1")


class ReplyForm(NamedTuple):
    """The form of a bridge."""

    encoded: EncodedForm
    """With a blank for the text of each reply."""
    trims: bool
    """Texts are written trimmed; else as they are."""
    reads_ids: bool
    """It is of the ids of these calls alone."""


class ReplyForms:
    """The forms of bridges, with blanks for the text of the replies.

    Args:
        write: Runs the template.
        proof: Tells where a form will do.
        encoder: Of the tokenizer.
        chat_template: The template's source.
    """

    def __init__(
        self, write: WriteReplies, *, proof: FormProof, encoder: ControlledEncoder, chat_template: str
    ) -> None:
        self._write = write
        self._proof = proof
        self._may_read_ids = _READS_IDS.search(chat_template) is not None
        self._encoder = encoder
        self._forms: LastUsed[EncodedForm | None] = LastUsed(MAX_FORMS)
        self._proofs: dict[object, _Proved] = {}

    def prove(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> None:
        """Tries whether replies like these can be written in a form: of the same key, with the same roles."""
        trims = self._proof.trims(self._with(replies, answered), num_texts=len(replies))
        reads_ids = trims is not None and self._reads_ids(replies, answered)
        self._proofs[_shape(key, replies)] = _Proved(trims, reads_ids)

    def find(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> ReplyForm | None:
        """The form for replies like these; None if the template has to be run for them."""
        if not all(map(_is_plain, replies)):
            return None
        shape = _shape(key, replies)
        proved = self._proofs.get(shape)
        if proved is None:
            if len(self._proofs) >= MAX_SHAPES:
                return None
            self.prove(key, replies, answered)
            proved = self._proofs[shape]
        if proved.trims is None:
            return None
        shown = (key, _shown(replies, answered, with_ids=proved.reads_ids))
        form = self._forms.get(shown, lambda: self._form(replies, answered))
        return None if form is None else ReplyForm(form, proved.trims, proved.reads_ids)

    def filled(self, form: ReplyForm, replies: Sequence[Message]) -> IntArray:
        """The bridge's tokens."""
        return form.encoded.ids([self._proof.written(r["content"], trims=form.trims) for r in replies])

    def _form(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> EncodedForm | None:
        parts = form_of(self._with(replies, answered), num_texts=len(replies))
        return EncodedForm.of(parts, encoder=self._encoder)

    def _with(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> Write:
        def write(texts: Sequence[str]) -> str:
            filled = [{**reply, "content": text} for reply, text in zip(replies, texts, strict=True)]
            return self._write(filled, answered)

        return write

    def _reads_ids(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> bool:
        """Whether the template looks at the ids of calls: its source names them, or they change what it writes."""
        if self._may_read_ids:
            return True
        usual = self._write(replies, answered)
        others = (
            self._write(
                [{**reply, "tool_call_id": id_} for reply in replies],
                [CallKey(call.name, id_) for call in answered],
            )
            for id_ in _OTHER_IDS
        )
        return any(other != usual for other in others)


class _Proved(NamedTuple):
    trims: bool | None
    """Texts are written trimmed, or as they are; None if neither."""
    reads_ids: bool
    """What is written depends on the ids of calls."""


def _shape(key: str, replies: Sequence[Message]) -> object:
    """Replies of one shape are written alike, however many follow each other with one role."""
    return key, *map(itemgetter(0), groupby([reply.get("role") for reply in replies]))


def _shown(replies: Sequence[Message], answered: Sequence[CallKey], *, with_ids: bool) -> object:
    """All that the template is shown but the texts; ids, which are new each time, only if it looks at them."""
    if with_ids:
        return (*[(r["role"], r.get("name"), r.get("tool_call_id")) for r in replies], *answered)
    return (*[(r["role"], r.get("name")) for r in replies], *[call.name for call in answered])


def _is_plain(reply: Message) -> bool:
    return isinstance(reply.get("content"), str) and _FIELDS.issuperset(reply)
