"""First prompts written without running the template again: the same system prompt and tools, another question."""

from __future__ import annotations

import marshal
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from agent_loop.chat.encoded_form import EncodedForm
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.forms import FormProof, Write, form_of
from agent_loop.chat.last_used import LastUsed
from agent_loop.chat.rendering import Renderer
from agent_loop.types import IntArray, Message

MAX_FORMS = 64
"""So many pairs of system prompt and tools are kept, those used last."""
MAX_PROMPTS = 8
"""And so many whole prompts: the trajectories of a group, which have the same, begin together."""

_CLOCK = "strftime_now"
_FORMAT = re.compile(_CLOCK + r"\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\)")


class PromptForms:
    """The forms of prompts of one question, behind a system prompt or not, with a blank for the question.

    Args:
        renderer: Of the template.
        proof: Tells where a form will do.
        encoder: Of the tokenizer.
        chat_template: The template's source.
    """

    def __init__(
        self, renderer: Renderer, *, proof: FormProof, encoder: ControlledEncoder, chat_template: str
    ) -> None:
        self._renderer = renderer
        self._proof = proof
        formats = _FORMAT.findall(chat_template)
        self._has_readable_clock = len(formats) == chat_template.count(_CLOCK)
        self._formats = sorted({single or double for single, double in formats})
        self._trims: dict[tuple[bool, bool], bool | None] = {}
        self._encoder = encoder
        self._forms: LastUsed[EncodedForm | None] = LastUsed(MAX_FORMS)
        self._prompts: LastUsed[IntArray] = LastUsed(MAX_PROMPTS)

    def ids(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]) -> IntArray | None:
        """The prompt's tokens, shape [num_tokens]; None if the template has to be run for them.

        Raises:
            ChatTemplateError: The template does not accept such messages.
        """
        key = self._key(messages, tools)
        if key is None:
            return None
        write = self._with(messages, tools)
        shape = (len(messages) > 1, bool(tools))
        if shape not in self._trims:
            self._trims[shape] = self._proof.trims(write, num_texts=1)
        trims = self._trims[shape]
        if trims is None:
            return None
        form = self._forms.get(
            key, lambda: EncodedForm.of(form_of(write, num_texts=1), encoder=self._encoder)
        )
        if form is None:
            return None
        question = messages[-1]["content"]
        ids = self._prompts.get(
            (key, question), lambda: form.ids([self._proof.written(question, trims=trims)])
        )
        return ids.copy()

    def _key(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bytes | None:
        """All that the template is shown but the question, and what its clock says; None for other prompts."""
        is_question = [message.get("role") for message in messages] in (["user"], ["system", "user"])
        if not (is_question and self._has_readable_clock and all(map(_is_plain, messages))):
            return None
        now = datetime.now() if self._formats else None
        clock = [now.strftime(text) for text in self._formats] if now else []
        head = [message["content"] for message in messages[:-1]]
        try:
            return marshal.dumps((head, [dict(tool) for tool in tools], clock), 2)
        except ValueError:  # (a schema may hold what is no plain value)
            return None

    def _with(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Write:
        def write(texts: Sequence[str]) -> str:
            return self._renderer.text([*messages[:-1], {**messages[-1], "content": texts[0]}], tools=tools)

        return write


def _is_plain(message: Message) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)
