"""The tokens that a turn adds after the model's tokens, for any chat template.

The template renders placeholder turns and the new messages. What the template writes after the sentinel, the
assistant's last text in the placeholder, is the rest of the assistant's turn, the close of the turn, and the messages.
Which part of that the model samples itself is determined once, when a template is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice

from agent_loop.chat.cached_bridges import CachedBridges
from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.placeholder_turns import CallKey, PlaceholderTurns, candidates, with_generated_ids
from agent_loop.chat.rendering import SENTINEL, Renderer
from agent_loop.chat.slot_check import SlotCheck
from agent_loop.errors import ChatTemplateError
from agent_loop.types import IntArray, Message, ToolCall, as_token_ids

_NAMES = ("first.tool", "other.tool")
_IDS = ("id0000001", "id0000002")
_TEXTS = ("first.reply", "other.reply")
_ANSWERED = tuple(map(CallKey, _NAMES, _IDS))

_USER_REPLY: list[Message] = [{"role": "user", "content": _TEXTS[0]}]
_TOOL_REPLIES: list[Message] = [
    {"role": "tool", "content": text, "name": name, "tool_call_id": id_}
    for text, name, id_ in zip(_TEXTS, _NAMES, _IDS, strict=True)
]


@dataclass(frozen=True, slots=True)
class Joint:
    """Boundary between an assistant turn and a reply, in what a template writes after the sentinel."""

    placeholder: PlaceholderTurns
    sampled: str
    """Text after the sentinel that the model samples itself: the end of its calls."""
    close: str
    """Text with which the template closes the turn; empty if the opening of the reply closes the turn."""
    opening: str
    """Text after `sampled`, the close included, up to the first text that varies."""
    num_closing: int
    """Number of control tokens in `close`."""
    num_stops: int
    """Number of control tokens after `sampled` at which the model may have stopped."""

    def after(self, rendered: str) -> str:
        """Return the text of the bridge in a rendered text: close, replies, generation prompt.

        Raises:
            ChatTemplateError: The end of the assistant's turn cannot be found.
        """
        tail = rendered[rendered.rindex(SENTINEL) + len(SENTINEL) :]
        if tail.startswith(self.sampled):
            return tail[len(self.sampled) :]
        found = tail.find(self.opening)  # `sampled` holds the name or the id of another call
        if found < 0 or not self.opening:
            raise ChatTemplateError(
                f"the chat template cannot be bridged: the end of the assistant's turn is not in {tail[:80]!r}"
            )
        return tail[found:]


class BridgeBuilder:
    """Encodes replies after an assistant turn that is not rendered.

    Args:
        renderer: Renderer of the template.
        encoder: Encoder of the tokenizer.
        check: Decides where the template need not run for each bridge.
        eos_token_ids: Further tokens at which the model may end a turn.
        chat_template: Source of the template.

    Raises:
        ChatTemplateError: The template can render neither a user's nor a tool's reply after an assistant turn.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        encoder: ControlledEncoder,
        check: SlotCheck,
        eos_token_ids: Set[int],
        chat_template: str,
    ) -> None:
        self._renderer = renderer
        self._encoder = encoder
        self._plain_close = ""
        self.user = self._find_joint(_USER_REPLY, for_tools=False)
        self._plain_close = "" if isinstance(self.user, ChatTemplateError) else self.user.close
        self.tool = self._find_joint(_TOOL_REPLIES[:1], for_tools=True)
        self.tools = self._find_joint(_TOOL_REPLIES, for_tools=True)
        if isinstance(self.user, ChatTemplateError) and isinstance(self.tool, ChatTemplateError):
            raise self.user
        self._joints = {"user": self.user, "tool": self.tool, "tools": self.tools}
        self.close_ids = self._find_close_ids()
        """Tokens with which the template closes a turn."""
        self.end_ids = self.close_ids | eos_token_ids
        """Tokens at which the model may end a turn."""
        self._cached = CachedBridges(self._render, check=check, encoder=encoder, chat_template=chat_template)
        for replies in (_USER_REPLY, _TOOL_REPLIES[:1], _TOOL_REPLIES):
            self._cached.check_shape(_joint_key(replies), replies, _ANSWERED[: len(replies)])

    def ids(
        self, replies: Sequence[Message], *, last_token_id: int | None, calls: Sequence[ToolCall] = ()
    ) -> IntArray:
        """Return the tokens of a bridge. See `ChatTemplate.bridge`."""
        key = _joint_key(replies)
        joint = self._joint(key)
        answered = joint.placeholder.answered(replies, calls=calls)
        try:
            ids = self._all_ids(key, replies, answered)
        except ChatTemplateError:
            # The model may have written an id that its own template refuses.
            renamed = with_generated_ids(answered)
            if not joint.placeholder.fills_in or renamed == answered:
                raise
            ids = self._all_ids(key, replies, renamed)
        return ids[self._num_sampled(ids, last_token_id, joint) :]

    def joint(self, replies: Sequence[Message]) -> Joint:
        """Return the joint for replies of these roles.

        Raises:
            ChatTemplateError: The template cannot render such replies after an assistant turn.
        """
        return self._joint(_joint_key(replies))

    def adapted(self, message: Message) -> Message:
        """Return a message whose calls have the form that the template accepts."""
        return message if isinstance(self.tool, ChatTemplateError) else self.tool.placeholder.adapted(message)

    def filled(self, replies: Sequence[Message], *, calls: Sequence[ToolCall] = ()) -> list[Message]:
        """Return the replies with names and ids where the template demands them."""
        placeholder = self.joint(replies).placeholder
        return placeholder.filled(replies, placeholder.answered(replies, calls=calls))

    def rendered_ids(self, replies: Sequence[Message], *, calls: Sequence[ToolCall] = ()) -> list[int]:
        """Return the tokens of a bridge by running the template. Tests compare `ids` with these tokens."""
        answered = self.joint(replies).placeholder.answered(replies, calls=calls)
        return self._encoder.encode(self._render(replies, answered))

    def _all_ids(self, key: str, replies: Sequence[Message], answered: Sequence[CallKey]) -> IntArray:
        """Return the tokens of a bridge, with those that the model may have sampled."""
        ids = self._cached.ids(key, replies, answered)
        return as_token_ids(self._encoder.encode(self._render(replies, answered))) if ids is None else ids

    def _render(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> str:
        joint = self.joint(replies)
        turns = joint.placeholder.messages(answered)
        filled = joint.placeholder.filled(replies, answered)
        return joint.after(self._renderer.text(filled, after=turns, tools=joint.placeholder.tools))

    def _joint(self, key: str) -> Joint:
        joint = self._joints[key]
        if isinstance(joint, ChatTemplateError):
            raise joint
        return joint

    def _num_sampled(self, ids: IntArray, last_token_id: int | None, joint: Joint) -> int:
        """Return how many leading tokens of a bridge the model has sampled: those up to its last token."""
        if last_token_id is None:
            return 0
        controls = (i for i, token_id in enumerate(ids) if int(token_id) in self._encoder.control_ids)
        positions = list(islice(controls, max(joint.num_stops, joint.num_closing)))
        for position in positions[: joint.num_stops]:
            if ids[position] == last_token_id:
                return position + 1
        # The model ended its turn with another token than the template's close.
        ended_otherwise = joint.num_closing > 0 and last_token_id in self.end_ids
        return positions[joint.num_closing - 1] + 1 if ended_otherwise else 0

    def _find_joint(self, replies: list[Message], *, for_tools: bool) -> Joint | ChatTemplateError:
        """Return the joint of the first placeholder that works, or the error of the simplest placeholder."""
        errors: list[ChatTemplateError] = []
        for placeholder in candidates(for_tools=for_tools):
            try:
                return self._joint_of(placeholder, replies)
            except ChatTemplateError as error:
                if not placeholder.has_calls:
                    errors.append(error)
        return errors[0]

    def _joint_of(self, placeholder: PlaceholderTurns, replies: list[Message]) -> Joint:
        """Return the joint, from a render with replies and a render without.

        Raises:
            ChatTemplateError: The template refuses the messages or leaves one out.
        """
        turns = placeholder.messages(_ANSWERED[: len(replies)])
        continued = self._continued(turns, placeholder, replies)
        if placeholder.has_calls and self._demands_names(turns, placeholder, replies):
            placeholder = replace(placeholder, fills_in=True)
        ended = self._tail(turns, placeholder, add_generation_prompt=False)
        shared = self._encoder.shared(continued, ended)
        sampled = self._sampled(shared, placeholder)
        after_sampled = continued[len(sampled) :]
        varying = [after_sampled.find(text) for text in (*_TEXTS, *_NAMES, *_IDS)]
        opening = after_sampled[: min(found for found in varying if found >= 0)]
        close = shared[len(sampled) :]
        if not placeholder.has_calls and ended and not close:
            close = self._first_control(after_sampled)  # the close is another token once a message follows
        if self._opens_reply(close, opening, placeholder):
            close = ""
        is_plain_close = bool(close) and (not placeholder.has_calls or close == self._plain_close)
        num_closing = len(self._encoder.control_spans(close))
        return Joint(
            placeholder=placeholder,
            sampled=sampled,
            close=close,
            opening=opening,
            num_closing=num_closing,
            num_stops=num_closing + (0 if is_plain_close else 1),
        )

    def _continued(self, turns: list[Message], placeholder: PlaceholderTurns, replies: list[Message]) -> str:
        """Return what the template writes after the sentinel with replies.

        Raises:
            ChatTemplateError: The template refuses the replies or leaves their text out.
        """
        continued = self._tail(turns, placeholder, replies=replies, add_generation_prompt=True)
        texts = [re.escape(str(reply["content"])) for reply in replies]
        if not re.search(".*".join(texts), continued, re.DOTALL):
            role = replies[0]["role"]
            raise ChatTemplateError(f"the chat template cannot be bridged: it leaves out {role} messages")
        return continued

    def _demands_names(
        self, turns: list[Message], placeholder: PlaceholderTurns, replies: list[Message]
    ) -> bool:
        """Return whether the template refuses tool messages without a name and an id."""
        bare: list[Message] = [{"role": "tool", "content": reply["content"]} for reply in replies]
        try:
            self._continued(turns, placeholder, bare)
        except ChatTemplateError:
            return True
        return False

    def _opens_reply(self, close: str, opening: str, placeholder: PlaceholderTurns) -> bool:
        """Return whether the text that seems to close the turn is the beginning of every reply."""
        if not opening.removeprefix(close).strip() or (placeholder.has_calls and not self._plain_close):
            return True
        if not close or not placeholder.has_calls or close == self._plain_close:
            return False
        first, second = (re.escape(str(reply["content"])) for reply in _TOOL_REPLIES)
        try:
            rendered = self._renderer.text(
                _TOOL_REPLIES, after=placeholder.messages(_ANSWERED), tools=placeholder.tools
            )
        except ChatTemplateError:
            return False
        between = re.search(f"{first}(.*){second}", rendered, re.DOTALL)
        return between is not None and close.strip() in between[1]

    def _tail(
        self,
        turns: list[Message],
        placeholder: PlaceholderTurns,
        *,
        replies: Sequence[Message] = (),
        add_generation_prompt: bool,
    ) -> str:
        """Return what the template writes after the sentinel.

        Raises:
            ChatTemplateError: The template refuses the messages or leaves the assistant's turn out.
        """
        rendered = self._renderer.text(
            replies, after=turns, tools=placeholder.tools, add_generation_prompt=add_generation_prompt
        )
        _, found, tail = rendered.rpartition(SENTINEL)
        if not found:
            raise ChatTemplateError(
                f"the chat template cannot be bridged: it leaves out the assistant turn before {rendered[-60:]!r}"
            )
        return tail

    def _sampled(self, shared: str, placeholder: PlaceholderTurns) -> str:
        """Return the part of `shared` that the model samples: everything except the close of the turn."""
        if not placeholder.has_calls:
            return ""
        if self._plain_close and shared.endswith(self._plain_close):
            return shared.removesuffix(self._plain_close)
        *_, (start, end) = [(0, 0), *self._encoder.control_spans(shared)]
        is_last = end > 0 and not shared[end:].strip()
        return shared[:start] if is_last and not self._ends_calls(shared[start:end], placeholder) else shared

    def _ends_calls(self, control: str, placeholder: PlaceholderTurns) -> bool:
        """Return whether the template ends each call, and not only the turn, with a control token."""
        calls = placeholder.messages(_ANSWERED)
        try:
            rendered = self._renderer.text(
                [], after=calls, tools=placeholder.tools, add_generation_prompt=False
            )
        except ChatTemplateError:
            # The template takes one call per turn: assume that turns with calls have a close if other turns have one.
            return not self._plain_close
        between = rendered.split(SENTINEL)[1:-1]
        return any(control in text for text in between)

    def _find_close_ids(self) -> frozenset[int]:
        joints = [joint for joint in self._joints.values() if not isinstance(joint, ChatTemplateError)]
        closes = [joint.close or self._first_control(joint.opening) for joint in joints]
        if not isinstance(self.user, ChatTemplateError):
            placeholder = self.user.placeholder
            closes.append(self._tail(placeholder.messages([]), placeholder, add_generation_prompt=False))
        ids = {token_id for close in closes for token_id in self._encoder.encode(close)}
        return self._encoder.control_ids & ids

    def _first_control(self, text: str) -> str:
        spans = self._encoder.control_spans(text)
        return text[slice(*spans[0])] if spans else ""


def _joint_key(replies: Sequence[Message]) -> str:
    """Return which joint the replies need: `user`, `tool` or `tools`."""
    roles = [reply.get("role") for reply in replies[:2]]
    if roles == ["tool", "tool"]:
        return "tools"
    return "tool" if roles[:1] == ["tool"] else "user"
