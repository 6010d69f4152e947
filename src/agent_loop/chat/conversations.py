"""Tokens of a conversation that is already complete, as if a model had sampled its assistant turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.assistant_turns import completion_ids
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import IntArray, Message, Origin, ToolCall, as_token_ids

USER_REPLY: Sequence[Message] = ({"role": "user", "content": "-"},)
"""Reply after the last turn, which shows how the template closes a turn."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens of a conversation with one origin."""

    token_ids: IntArray
    origin: Origin
    """`MODEL` for the turns of the assistant, with the token that ends them."""
    message: int | None = None
    """Index of the message of an assistant turn."""


def encode_conversation(
    template: ChatTemplate, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
) -> list[TokenRun]:
    """Return the tokens that a rollout of this conversation would have recorded.

    The first prompt is rendered once. An assistant turn has the tokens that the template renders for it, up to the
    token at which a model would stop, and the messages between two turns are bridged. A turn is rendered as the last
    message of its conversation, as a model sees it: reasoning that the template drops from earlier turns stays.

    Args:
        template: The chat template.
        messages: Messages in the OpenAI form, with the arguments of calls as mappings. Messages after the last
            assistant turn are left out.
        tools: OpenAI function schemas.

    Raises:
        ChatTemplateError: There is no prompt or no assistant turn, two assistant turns follow each other, a message has
            an image, or the template cannot render the messages.
    """
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ChatTemplateError("the conversation has no assistant message; add one")
    if turns[0] == 0:
        raise ChatTemplateError("the conversation begins with an assistant message; add the prompt before it")
    messages = [template.bridges.adapted(message) for message in messages]
    runs = [TokenRun(template.open(messages[: turns[0]], tools=tools), Origin.PROMPT)]
    for number, turn in enumerate(turns):
        replies = messages[turns[number - 1] + 1 : turn] if number else ()
        if number:
            runs.append(_bridge(template, runs[-1], replies, calls=_calls(messages[turns[number - 1]])))
        rendered = _rendered_turn(template, messages[: turn + 1], tools=tools)
        next_id = int(template.bridge(USER_REPLY)[0])
        ids = completion_ids(template, rendered, next_id=next_id)
        runs.append(TokenRun(as_token_ids(ids), Origin.MODEL, turn))
    return runs


def _bridge(
    template: ChatTemplate, turn: TokenRun, replies: Sequence[Message], *, calls: Sequence[ToolCall]
) -> TokenRun:
    if not replies:
        raise ChatTemplateError(
            f"messages {turn.message} and {(turn.message or 0) + 1} are both of the assistant; join them, or add the "
            "message between them"
        )
    ids = template.bridge(replies, last_token_id=int(turn.token_ids[-1]), calls=calls)
    return TokenRun(ids, Origin.TOOL if replies[0]["role"] == "tool" else Origin.INTERACTION)


def _rendered_turn(
    template: ChatTemplate, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]
) -> str:
    """Return what the template renders for the last message, after the generation prompt."""
    before = template.renderer.text(messages[:-1], tools=tools)
    ended = template.renderer.text(messages, tools=tools, add_generation_prompt=False)
    if ended.startswith(before):
        return ended[len(before) :]
    shared = template.encoder.shared(ended, before)
    if before[len(shared) :].strip():
        raise ChatTemplateError(
            f"the template renders assistant message {len(messages) - 1} without the end of its generation prompt, "
            f"{template.encoder.unmask(before[len(shared) :])[:80]!r}; give the message the reasoning_content that the "
            "prompt opens, or set a variable of the template such as enable_thinking"
        )
    return ended[len(shared) :]


def _calls(message: Message) -> list[ToolCall]:
    """Return the calls of a message, whose arguments do not matter to a bridge."""
    calls = message.get("tool_calls") or ()
    return [ToolCall(call["function"]["name"], {}, id=call.get("id") or "") for call in calls]
