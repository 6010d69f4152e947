"""Tokens of a conversation that is already complete, as if a model had sampled its assistant turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.chat.parsers import THINK
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
            if not replies:
                raise ChatTemplateError(
                    f"messages {before} and {turn} are both of the assistant; join them, or add one between them"
                )
            ids = template.bridge(replies, last_token_id=int(runs[-1].token_ids[-1]), calls=calls)
            runs.append(TokenRun(ids, Origin.TOOL if replies[0]["role"] == "tool" else Origin.INTERACTION))
            history += bridges.filled(replies, calls=calls)
        message = bridges.adapted(messages[turn])
        rendered = _rendered_turn(template, [*history, message], tools=tools)
        # Reasoning of earlier turns is left out, since a template may drop it once the last turn follows.
        history.append({key: value for key, value in message.items() if key != "reasoning_content"})
        ids = completion_ids(template, rendered, next_id=_next_id(template, messages[turn : turn + 2]))
        runs.append(TokenRun(as_token_ids(ids), Origin.MODEL, turn))
    return runs


def _next_id(template: ChatTemplate, turn: Sequence[Message]) -> int:
    """Return the first token that the reply to a turn adds after its text."""
    has_calls = bool(turn[0].get("tool_calls"))
    reply = turn[1] if len(turn) > 1 else {"role": "tool" if has_calls else "user", "content": "-"}
    return int(template.bridge([reply], calls=_calls(turn[0])[:1])[0])


def _rendered_turn(
    template: ChatTemplate, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]]
) -> str:
    """Return what a model writes as the last message, after the generation prompt.

    That is what the template renders, and before it the reasoning if the template leaves reasoning out of messages.
    """
    *history, message = messages
    where = f"assistant message {len(history)}"
    before = template.renderer.text(history, tools=tools)

    def rendered(message: Message) -> tuple[str, str]:
        """Return the end of the generation prompt that is not in the turn, and the turn after the prompt."""
        ended = template.renderer.text([*history, message], tools=tools, add_generation_prompt=False)
        shared = before if ended.startswith(before) else template.encoder.shared(ended, before)
        return before[len(shared) :], ended[len(shared) :]

    reasoning, answer = _split_reasoning(message, template)
    opened, turn = rendered(answer)
    text = template.encoder.unmask(turn)
    if not all(call["function"]["name"] in text for call in message.get("tool_calls") or ()):
        raise ChatTemplateError(f"the template leaves out calls of {where}")
    if reasoning is None and not opened.strip():
        return turn
    if reasoning is not None:
        for variant in ({**answer, "reasoning_content": reasoning}, message):
            begun, full = rendered(variant)
            is_whole = not reasoning or (reasoning in template.encoder.unmask(full) and full != turn)
            if is_whole and not begun.strip():
                return full
    else:
        remedy = "give the message the reasoning_content that the prompt opens"
        if template.mentions("enable_thinking"):
            remedy += ", or set model.chat_template_kwargs.enable_thinking=false"
        raise ChatTemplateError(
            f"the template renders {where} without the end of its generation prompt, "
            f"{template.encoder.unmask(opened)[:80]!r}; {remedy}"
        )
    marks = next(iter(template.tool_parser.reasoning_marks), None)
    start = "" if marks is None else f"{marks.opening}{marks.label}"
    if (
        marks is None
        or opened.strip() not in ("", start)
        or turn.startswith(start)
        or marks.closing not in str(template.tokenizer.chat_template)
    ):
        raise ChatTemplateError(
            f"the template leaves out the reasoning of {where}, and rollout.multi_turn.format has no marks for the "
            "reasoning of this template; set another format or template, or leave the reasoning out"
        )
    begin = "" if opened.strip() else f"{start}\n"
    end = f"\n{marks.closing}" + ("\n\n" if marks == THINK else "")
    return f"{begin}{template.encoder.mask(reasoning)}{end}{turn}"


def _split_reasoning(message: Message, template: ChatTemplate) -> tuple[str | None, Message]:
    """Return the reasoning of a message, or None if it has none, and the message without it."""
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning.strip():
        answer = {key: value for key, value in message.items() if key != "reasoning_content"}
        return reasoning.strip(), answer
    for marks in template.tool_parser.reasoning_marks:
        if isinstance(content, str) and marks.closing in content:
            reasoning, _, text = content.partition(marks.closing)
            reasoning = reasoning.strip().removeprefix(marks.opening).removeprefix(marks.label)
            return reasoning.strip(), {**message, "content": text.lstrip("\n")}
    return None, message


def _calls(message: Message) -> list[ToolCall]:
    """Return the calls of a message, whose arguments do not matter to a bridge."""
    calls = message.get("tool_calls") or ()
    return [ToolCall(call["function"]["name"], {}, id=call.get("id") or "") for call in calls]


def completion_ids(template: ChatTemplate, rendered: str, *, next_id: int) -> list[int]:
    """Return the tokens of a completion: those of a rendered text, up to the token at which a model would stop.

    Args:
        template: The template that rendered the text.
        rendered: The text after the generation prompt, with the close of the turn, as `template.renderer` returns it.
        next_id: The first token that a reply would add after the text. If the template does not close turns, the model
            stops at this token.
    """
    ids = template.encoder.encode(rendered)
    stop = _stop(template, ids)
    if stop is not None:
        return ids[: stop + 1]
    return [*ids, next_id] if next_id in template.end_ids else ids


def _stop(template: ChatTemplate, ids: Sequence[int]) -> int | None:
    """Return the position of the first of the end tokens that close the turn, or None if there are none."""
    stop = None
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] in template.end_ids:
            stop = position
        elif template.decode([ids[position]]).strip():
            break
    return stop
