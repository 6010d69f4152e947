"""Tokens of a conversation that is already complete, as if a model had sampled its assistant turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.assistant_turns import completion_ids
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import IntArray, Message, Origin, ToolCall, as_token_ids


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
    bridges = template.bridges
    history = [bridges.adapted(message) for message in messages[: turns[0]]]
    runs = [TokenRun(template.open(messages[: turns[0]], tools=tools), Origin.PROMPT)]
    for number, turn in enumerate(turns):
        if number:
            before = turns[number - 1]
            replies, calls = messages[before + 1 : turn], _calls(messages[before])
            runs.append(_bridge(template, runs[-1], replies, calls=calls))
            history += bridges.filled(replies, calls=calls)
        history.append(bridges.adapted(messages[turn]))
        rendered = _rendered_turn(template, history, tools=tools)
        ids = completion_ids(template, rendered, next_id=_next_id(template, messages[turn : turn + 2]))
        runs.append(TokenRun(as_token_ids(ids), Origin.MODEL, turn))
    return runs


def _next_id(template: ChatTemplate, turn: Sequence[Message]) -> int:
    """Return the first token that the reply to a turn adds after its text.

    Args:
        template: The chat template.
        turn: The message of the turn, and the message after it if there is one.
    """
    has_calls = bool(turn[0].get("tool_calls"))
    reply = turn[1] if len(turn) > 1 else {"role": "tool" if has_calls else "user", "content": "-"}
    return int(template.bridge([reply], calls=_calls(turn[0])[:1])[0])


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
