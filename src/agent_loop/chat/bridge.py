"""What a turn adds after the model's tokens, for any chat template.

A stand-in for the conversation is rendered with the new messages behind it; what the template writes after the
stand-in's last word is the rest of the assistant's turn, its close, and the messages. How much of that the model says
itself is found out once, when a template is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.forms import FormProof
from agent_loop.chat.last_used import LastUsed
from agent_loop.chat.rendering import SENTINEL, Renderer
from agent_loop.chat.reply_forms import MAX_FORMS, ReplyForm, ReplyForms
from agent_loop.chat.stand_ins import CallKey, StandIn, candidates, with_made_up_ids
from agent_loop.errors import ChatTemplateError
from agent_loop.types import IntArray, Message, ToolCall, as_token_ids

_NAMES = ("first.tool", "other.tool")
_IDS = ("id0000001", "id0000002")
_TEXTS = ("first.reply", "other.reply")
_ANSWERED = tuple(map(CallKey, _NAMES, _IDS))

_FOLLOW_UP: list[Message] = [{"role": "user", "content": _TEXTS[0]}]
_TOOL_REPLIES: list[Message] = [
    {"role": "tool", "content": text, "name": name, "tool_call_id": id_}
    for text, name, id_ in zip(_TEXTS, _NAMES, _IDS, strict=True)
]


@dataclass(frozen=True, slots=True)
class Joint:
    """Where an assistant turn ends and a reply begins, in what a template writes after the sentinel."""

    stand_in: StandIn
    said: str
    """What the model itself says after the sentinel; for calls, their end."""
    close: str
    """What the template writes to close the turn; empty if the opening of the reply does that too."""
    opening: str
    """What follows `said`, the close included, up to the first thing that varies."""
    num_closing: int
    """Control tokens in `close`."""
    num_stops: int
    """How many of the control tokens that follow `said` may be the one at which the model stopped."""

    def after(self, rendered: str) -> str:
        """The bridge's text: close, replies, generation prompt."""
        tail = rendered[rendered.rindex(SENTINEL) + len(SENTINEL) :]
        if tail.startswith(self.said):
            return tail[len(self.said) :]
        found = tail.find(self.opening)  # (`said` holds the name or the id of a call)
        if found < 0 or not self.opening:
            raise ChatTemplateError(
                f"the chat template cannot be bridged: no end of the turn in {tail[:80]!r}"
            )
        return tail[found:]


class Bridge:
    """Writes replies after an assistant turn that is not rendered.

    Args:
        renderer: Of the template.
        encoder: Of the same tokenizer.
        proof: Tells where the template need not run each time.
        eos_token_id: The tokenizer's own end token, where it has one.
        chat_template: The template's source.

    Raises:
        ChatTemplateError: Neither a user's nor a tool's reply can be written after an assistant turn.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        encoder: ControlledEncoder,
        proof: FormProof,
        eos_token_id: int | None,
        chat_template: str,
    ) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._plain_close = ""
        self.user = self._find_joint(_FOLLOW_UP, for_tools=False)
        self._plain_close = "" if isinstance(self.user, ChatTemplateError) else self.user.close
        self.tool = self._find_joint(_TOOL_REPLIES[:1], for_tools=True)
        self.tools = self._find_joint(_TOOL_REPLIES, for_tools=True)
        if isinstance(self.user, ChatTemplateError) and isinstance(self.tool, ChatTemplateError):
            raise self.user
        self._joints = {"user": self.user, "tool": self.tool, "tools": self.tools}
        self.end_ids = self._find_end_ids() | ({eos_token_id} if eos_token_id is not None else set[int]())
        """At any of these the model may end a turn."""
        self._forms = ReplyForms(self._write, proof=proof, encoder=encoder, chat_template=chat_template)
        self._usual: LastUsed[tuple[Joint, ReplyForm] | None] = LastUsed(MAX_FORMS)
        """By what replies look like."""
        for replies in (_FOLLOW_UP, _TOOL_REPLIES[:1], _TOOL_REPLIES):
            self._forms.prove(_key(replies), replies, _ANSWERED[: len(replies)])

    def ids(
        self, replies: Sequence[Message], *, last_token_id: int | None, calls: Sequence[ToolCall] = ()
    ) -> IntArray:
        """See `ChatTemplate.bridge`."""
        usual = self._usual.get(_seen(replies, calls), lambda: self._find_usual(replies, calls))
        if usual is not None:
            joint, form = usual
            ids = self._forms.filled(form, replies)
            return ids[self._num_sampled(ids, last_token_id, joint) :]
        key = _key(replies)
        joint = self._joint(key)
        answered = joint.stand_in.answered(replies, calls=calls)
        try:
            ids = self._all_ids(key, replies, answered)
        except ChatTemplateError:
            # A model may have written an id that its own template refuses.
            renamed = with_made_up_ids(answered)
            if not joint.stand_in.fills_in or renamed == answered:
                raise
            ids = self._all_ids(key, replies, renamed)
        return ids[self._num_sampled(ids, last_token_id, joint) :]

    def _find_usual(
        self, replies: Sequence[Message], calls: Sequence[ToolCall]
    ) -> tuple[Joint, ReplyForm] | None:
        """The form for all replies that look like these, whatever their texts and the ids of their calls."""
        key = _key(replies)
        joint = self._joint(key)
        try:
            form = self._forms.find(key, replies, joint.stand_in.answered(replies, calls=calls))
        except ChatTemplateError:
            return None
        return None if form is None or form.reads_ids else (joint, form)

    def _all_ids(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> IntArray:
        form = self._forms.find(key, replies, answered)
        if form is None:
            return as_token_ids(self._encoder.encode(self._write(replies, answered)))
        return self._forms.filled(form, replies)

    def _write(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> str:
        joint = self.joint(replies)
        turns = joint.stand_in.turns(answered)
        filled = joint.stand_in.filled(replies, answered)
        return joint.after(self._renderer.text(filled, after=turns, tools=joint.stand_in.tools))

    def joint(self, replies: Sequence[Message]) -> Joint:
        """The joint for replies like these.

        Raises:
            ChatTemplateError: The template does not write such replies after an assistant turn.
        """
        return self._joint(_key(replies))

    def _joint(self, key: str) -> Joint:
        joint = self._joints[key]
        if isinstance(joint, ChatTemplateError):
            raise joint
        return joint

    def written(self, message: Message) -> Message:
        """A message in the form in which the template reads calls."""
        return message if isinstance(self.tool, ChatTemplateError) else self.tool.stand_in.written(message)

    def filled(self, replies: Sequence[Message], *, calls: Sequence[ToolCall] = ()) -> list[Message]:
        """The replies as the template is shown them."""
        stand_in = self.joint(replies).stand_in
        return stand_in.filled(replies, stand_in.answered(replies, calls=calls))

    def _num_sampled(self, ids: IntArray, last_token_id: int | None, joint: Joint) -> int:
        """How many leading tokens of a bridge the model has already said: those up to where it stopped."""
        if last_token_id is None:
            return 0
        is_first = ids[:1].tolist() == [last_token_id]
        if is_first and joint.num_stops and last_token_id in self._encoder.control_ids:
            return 1  # (as nearly always)
        all_controls = (i for i, token_id in enumerate(ids.tolist()) if token_id in self._encoder.control_ids)
        controls = list(islice(all_controls, max(joint.num_stops, joint.num_closing)))
        for position in controls[: joint.num_stops]:
            if ids[position] == last_token_id:
                return position + 1
        # It ended the turn with another token than the template writes in its place.
        ended_otherwise = joint.num_closing > 0 and last_token_id in self.end_ids
        return controls[joint.num_closing - 1] + 1 if ended_otherwise else 0

    def _find_joint(self, replies: list[Message], *, for_tools: bool) -> Joint | ChatTemplateError:
        """The first joint that works; if none does, why the plainest stand-in does not."""
        errors: list[ChatTemplateError] = []
        for stand_in in candidates(for_tools=for_tools):
            try:
                return self._joint_of(stand_in, replies)
            except ChatTemplateError as error:
                if not stand_in.has_calls:
                    errors.append(error)
        return errors[0]

    def _joint_of(self, stand_in: StandIn, replies: list[Message]) -> Joint:
        """Learns the joint from a render with replies and one without.

        Raises:
            ChatTemplateError: The template refuses the messages or leaves something out.
        """
        turns = stand_in.turns(_ANSWERED[: len(replies)])
        continued = self._continued(turns, stand_in, replies)
        if stand_in.has_calls and self._demands_names(turns, stand_in, replies):
            stand_in = replace(stand_in, fills_in=True)
        ended = self._tail(turns, stand_in, add_generation_prompt=False)
        shared = self._encoder.shared(continued, ended)
        said = self._said(shared, stand_in)
        after_said = continued[len(said) :]
        varying = [after_said.find(text) for text in (*_TEXTS, *_NAMES, *_IDS)]
        opening = after_said[: min(found for found in varying if found >= 0)]
        close = shared[len(said) :]
        if not stand_in.has_calls and ended and not close:
            close = self._first_control(after_said)  # (closed with another token once something follows)
        if self._opens_reply(close, opening, stand_in):
            close = ""
        is_usual = bool(close) and (not stand_in.has_calls or close == self._plain_close)
        num_closing = len(self._encoder.control_spans(close))
        return Joint(
            stand_in=stand_in,
            said=said,
            close=close,
            opening=opening,
            num_closing=num_closing,
            num_stops=num_closing + (0 if is_usual else 1),
        )

    def _continued(self, turns: list[Message], stand_in: StandIn, replies: list[Message]) -> str:
        continued = self._tail(turns, stand_in, replies=replies, add_generation_prompt=True)
        texts = [re.escape(str(reply["content"])) for reply in replies]
        if not re.search(".*".join(texts), continued, re.DOTALL):
            role = replies[0]["role"]
            raise ChatTemplateError(f"the chat template cannot be bridged: it leaves out {role} messages")
        return continued

    def _demands_names(self, turns: list[Message], stand_in: StandIn, replies: list[Message]) -> bool:
        """Whether the template refuses tool messages without a name and an id."""
        bare: list[Message] = [{"role": "tool", "content": reply["content"]} for reply in replies]
        try:
            self._continued(turns, stand_in, bare)
        except ChatTemplateError:
            return True
        return False

    def _opens_reply(self, close: str, opening: str, stand_in: StandIn) -> bool:
        """Whether what seems to close the turn is how every reply begins."""
        if not opening.removeprefix(close).strip() or (stand_in.has_calls and not self._plain_close):
            return True
        if not close or not stand_in.has_calls or close == self._plain_close:
            return False
        first, second = (re.escape(str(reply["content"])) for reply in _TOOL_REPLIES)
        try:
            rendered = self._renderer.text(
                _TOOL_REPLIES, after=stand_in.turns(_ANSWERED), tools=stand_in.tools
            )
        except ChatTemplateError:
            return False
        between = re.search(f"{first}(.*){second}", rendered, re.DOTALL)
        return between is not None and close.strip() in between[1]

    def _tail(
        self,
        turns: list[Message],
        stand_in: StandIn,
        *,
        replies: Sequence[Message] = (),
        add_generation_prompt: bool,
    ) -> str:
        rendered = self._renderer.text(
            replies, after=turns, tools=stand_in.tools, add_generation_prompt=add_generation_prompt
        )
        _, found, tail = rendered.rpartition(SENTINEL)
        if not found:
            raise ChatTemplateError(
                f"the chat template cannot be bridged: it leaves out the assistant turn before {rendered[-60:]!r}"
            )
        return tail

    def _said(self, shared: str, stand_in: StandIn) -> str:
        """The part of `shared` that the model says: all but the close of the turn."""
        if not stand_in.has_calls:
            return ""
        if self._plain_close and shared.endswith(self._plain_close):
            return shared.removesuffix(self._plain_close)
        *_, (start, end) = [(0, 0), *self._encoder.control_spans(shared)]
        is_last = end > 0 and not shared[end:].strip()
        return shared[:start] if is_last and not self._ends_calls(shared[start:end], stand_in) else shared

    def _ends_calls(self, control: str, stand_in: StandIn) -> bool:
        """Whether the template ends each call with it, not only the turn."""
        calls = stand_in.turns(_ANSWERED)
        try:
            rendered = self._renderer.text([], after=calls, tools=stand_in.tools, add_generation_prompt=False)
        except ChatTemplateError:
            # One call a turn shows no difference: believe that turns have a close if answers have one.
            return not self._plain_close
        between = rendered.split(SENTINEL)[1:-1]
        return any(control in text for text in between)

    def _find_end_ids(self) -> frozenset[int]:
        joints = [joint for joint in self._joints.values() if not isinstance(joint, ChatTemplateError)]
        closes = [joint.close or self._first_control(joint.opening) for joint in joints]
        if not isinstance(self.user, ChatTemplateError):
            stand_in = self.user.stand_in
            closes.append(self._tail(stand_in.turns([]), stand_in, add_generation_prompt=False))
        ids = {token_id for close in closes for token_id in self._encoder.encode(close)}
        return self._encoder.control_ids & ids

    def _first_control(self, text: str) -> str:
        spans = self._encoder.control_spans(text)
        return text[slice(*spans[0])] if spans else ""


def _seen(replies: Sequence[Message], calls: Sequence[ToolCall]) -> tuple[object, ...]:
    """What replies look like but for their texts and the ids of their calls. What is said of each reply ends with a
    type, so that no two are taken for one."""
    seen: list[object] = []
    for reply in replies:
        seen += (*reply, reply.get("role"), reply.get("name"), type(reply.get("content")))
    for call in calls:
        seen.append(call.name)
    return tuple(seen)


def _key(replies: Sequence[Message]) -> str:
    """Which joint the replies need."""
    roles = [reply.get("role") for reply in replies[:2]]
    if roles == ["tool", "tool"]:
        return "tools"
    return "tool" if roles[:1] == ["tool"] else "user"
