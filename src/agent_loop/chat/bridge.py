"""The tokens that a turn adds after the model's tokens, for any chat template.

The template renders placeholder turns and the new messages. What the template writes after the sentinel, the
assistant's last text in the placeholder, is the rest of the assistant's turn, the close of the turn, and the messages.
Which part of that the model samples itself is determined once, when a template is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice, product, takewhile
from typing import Any, NamedTuple

from agent_loop.chat.encoding import ControlledEncoder
from agent_loop.chat.rendering import SENTINEL, Renderer
from agent_loop.errors import ChatTemplateError
from agent_loop.types import IntArray, Message, ToolCall, as_token_ids

_PARAMETER = "value"
"""The only argument of a placeholder call."""

_SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "placeholder",
        "description": "-",
        "parameters": {"type": "object", "properties": {_PARAMETER: {"type": "string", "description": "-"}}},
    },
}


class CallKey(NamedTuple):
    """Name and id by which a tool message refers to the call that it answers."""

    name: str
    id: str


@dataclass(frozen=True, slots=True)
class PlaceholderTurns:
    """One choice of placeholder turns. The sentinel is the assistant's last text in them."""

    has_calls: bool = False
    """The assistant calls a tool with the sentinel as the argument. Otherwise the sentinel is its text."""
    calls_each: bool = True
    """One call per tool message. Otherwise one call for all, for templates that refuse parallel calls."""
    arguments_as_json: bool = False
    """Arguments are a JSON string. Otherwise they are a mapping."""
    fills_in: bool = False
    """Tool messages without a name or an id get one, for templates that demand both."""
    has_schema: bool = False
    """The schema of a tool is given, which selects another of a tokenizer's templates."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (_SCHEMA,) if self.has_schema else ()

    def messages(self, answered: Sequence[CallKey]) -> list[Message]:
        """Return the messages before replies to these calls; the assistant's message is the last."""
        question: Message = {"role": "user", "content": "-"}
        if not self.has_calls:
            return [question, {"role": "assistant", "content": SENTINEL}]
        kept = answered if self.calls_each else answered[-1:]
        calls = [ToolCall(call.name, {_PARAMETER: SENTINEL}, id=call.id) for call in kept]
        return [question, self._message(calls)]

    def filled(self, replies: Sequence[Message], answered: Sequence[CallKey]) -> list[Message]:
        """Return the replies, with names and ids where the template demands them."""
        if not self.fills_in:
            return list(replies)
        filled = [
            {**reply, "name": call.name, "tool_call_id": call.id}
            for reply, call in zip(_tool_replies(replies), answered, strict=False)
        ]
        return [*filled, *replies[len(filled) :]]

    def answered(self, replies: Sequence[Message], *, calls: Sequence[ToolCall] = ()) -> list[CallKey]:
        """Return the call that each leading tool message answers.

        Args:
            replies: The new messages.
            calls: The calls of the assistant, for replies that do not name their call.
        """
        if not self.has_calls:
            return []
        leading = list(_tool_replies(replies))
        known = calls if len(calls) == len(leading) else [ToolCall("", {})] * len(leading)
        return [
            CallKey(
                str(reply.get("name") or call.name or "tool"),
                str(reply.get("tool_call_id") or call.id or _generated_id(i)),
            )
            for i, (reply, call) in enumerate(zip(leading, known, strict=True))
        ]

    def adapted(self, message: Message) -> Message:
        """Return an assistant message whose calls have the form that the template accepts."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        accepted = [
            ToolCall(c["function"]["name"], c["function"]["arguments"], id=c.get("id") or _generated_id(i))
            for i, c in enumerate(calls)
        ]
        return {**message, **self._message(accepted), "content": message.get("content") or ""}

    def _message(self, calls: Sequence[ToolCall]) -> Message:
        messages = [call.as_message() for call in calls]
        if self.arguments_as_json:
            for message in messages:
                arguments = message["function"]["arguments"]
                if not isinstance(arguments, str):
                    message["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return {"role": "assistant", "content": "", "tool_calls": messages}


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
        """Return the text of the bridge in a rendered text: close, replies, generation prompt."""
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
    """Encodes replies after an assistant turn that is not rendered."""

    def __init__(self, renderer: Renderer, *, encoder: ControlledEncoder, eos_token_ids: Set[int]) -> None:
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

    def ids(
        self, replies: Sequence[Message], *, last_token_id: int | None, calls: Sequence[ToolCall] = ()
    ) -> IntArray:
        """Return the tokens of a bridge. See `ChatTemplate.bridge`."""
        joint = self.joint(replies)
        answered = joint.placeholder.answered(replies, calls=calls)
        try:
            ids = self._all_ids(joint, replies, answered)
        except ChatTemplateError:
            # The model may have written an id that its own template refuses.
            renamed = [CallKey(call.name, _generated_id(i)) for i, call in enumerate(answered)]
            if not joint.placeholder.fills_in or renamed == answered:
                raise
            ids = self._all_ids(joint, replies, renamed)
        return ids[self._num_sampled(ids, last_token_id, joint) :]

    def joint(self, replies: Sequence[Message]) -> Joint:
        """Return the joint for replies of these roles."""
        joint = self._joints[_joint_key(replies)]
        if isinstance(joint, ChatTemplateError):
            raise joint
        return joint

    def adapted(self, message: Message) -> Message:
        """Return a message whose calls have the form that the template accepts."""
        return message if isinstance(self.tool, ChatTemplateError) else self.tool.placeholder.adapted(message)

    def filled(self, replies: Sequence[Message], *, calls: Sequence[ToolCall] = ()) -> list[Message]:
        """Return the replies with names and ids where the template demands them."""
        placeholder = self.joint(replies).placeholder
        return placeholder.filled(replies, placeholder.answered(replies, calls=calls))

    def _all_ids(self, joint: Joint, replies: Sequence[Message], answered: Sequence[CallKey]) -> IntArray:
        """Return the tokens of a bridge, with those that the model may have sampled."""
        placeholder = joint.placeholder
        rendered = self._renderer.text(
            placeholder.filled(replies, answered),
            after=placeholder.messages(answered),
            tools=placeholder.tools,
        )
        return as_token_ids(self._encoder.encode(joint.after(rendered)))

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
        for placeholder in _candidates(for_tools=for_tools):
            try:
                return self._joint_of(placeholder, replies)
            except ChatTemplateError as error:
                if not placeholder.has_calls:
                    errors.append(error)
        return errors[0]

    def _joint_of(self, placeholder: PlaceholderTurns, replies: list[Message]) -> Joint:
        """Return the joint, from a render with replies and a render without."""
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
        """Return what the template writes after the sentinel with replies."""
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
        """Return what the template writes after the sentinel."""
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


def _tool_replies(replies: Sequence[Message]) -> Iterator[Message]:
    """Yield the tool messages with which the replies begin."""
    return takewhile(lambda reply: reply.get("role") == "tool", replies)


def _candidates(*, for_tools: bool) -> Iterator[PlaceholderTurns]:
    """Yield the placeholders to try for tool replies or for other replies, the simplest first."""
    if for_tools:
        for has_schema, as_json, calls_each in product((False, True), (False, True), (True, False)):
            yield PlaceholderTurns(
                has_calls=True, calls_each=calls_each, arguments_as_json=as_json, has_schema=has_schema
            )
    yield PlaceholderTurns()
    yield PlaceholderTurns(has_schema=True)


def _generated_id(number: int) -> str:
    """Return an id of nine letters and digits, which even the strictest template accepts."""
    return f"call{number:05d}"
