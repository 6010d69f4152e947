"""Tokens with which an assistant turn begins before the model samples: a prefill, or the opening of a call."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.errors import RequestError, UnsupportedParameter
from agent_loop.types import IntArray, TokenIds


@dataclass(frozen=True, slots=True)
class TurnPrefix:
    """Beginning of an assistant turn."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """Text of the tokens, control tokens included."""
    given: str | None = None
    """Part of the text that the client has already; the response then holds only what follows. None if the client has
    nothing of it."""

    @classmethod
    def of_tokens(
        cls, token_ids: TokenIds, *, template: ChatTemplate, given: str | None = None
    ) -> TurnPrefix:
        """Return the prefix of these tokens."""
        return cls(tuple(int(token) for token in token_ids), template.decode(token_ids), given)


NO_PREFIX = TurnPrefix()


def can_force_call(request: ChatCompletionRequest, template: ChatTemplate) -> bool:
    """Return whether the format has a text that opens the call which the request forces."""
    return _opening_of_call(request, template) is not None


def can_stop_after_call(template: ChatTemplate) -> bool:
    """Return whether a completion can end after its first call, because the format marks the end of a call."""
    return bool(template.tool_parser.first_call_ends)


def begin_turn(
    request: ChatCompletionRequest, *, template: ChatTemplate, context: IntArray, prefill: str = ""
) -> TurnPrefix:
    """Return the prefix of the completion that answers a request.

    Reasoning that the prompt opens is closed first, because a forced call or a schema covers the whole completion.

    Args:
        request: The request.
        template: Chat template of the conversation.
        context: Tokens before the turn, with the generation prompt.
        prefill: Text that the completion continues. Control tokens in it become plain text.

    Raises:
        RequestError: The prefix cannot be written exactly in the model's format.
    """
    parser, reasoning = template.tool_parser, template.opened_reasoning(context)
    if prefill:
        if reasoning is not None:
            raise RequestError(
                "continue_final_message: the chat template begins each turn of the assistant with reasoning, so that "
                "its answer cannot be continued; switch thinking off with chat_template_kwargs if the template allows "
                "it, or leave continue_final_message out",
                param="continue_final_message",
            )
        text = parser.content_opening + template.encoder.mask(prefill)
        return TurnPrefix.of_tokens(template.encoder.encode(text), template=template, given=prefill)
    if not request.forces_call and not request.json_schema:
        return NO_PREFIX
    closing = "" if reasoning is None else f"\n{reasoning.closing}\n\n"
    opening = parser.content_opening
    if request.forces_call:
        opening = _opening_of_call(request, template)
        if opening is None:
            raise unsupported_call_error()
    if not (text := closing + opening):
        return NO_PREFIX
    return TurnPrefix.of_tokens(template.encoder.encode(text), template=template)


def check_calls(request: ChatCompletionRequest, template: ChatTemplate) -> None:
    """Refuse a request whose wishes about calls the model's format cannot express.

    Raises:
        UnsupportedParameter: The format has no text that opens a call, or none that ends one.
    """
    if request.forces_call and not can_force_call(request, template):
        raise unsupported_call_error()
    if request.has_one_call and not can_stop_after_call(template):
        raise UnsupportedParameter(
            "parallel_tool_calls: false is not supported, because the model's tool format does not mark the end of a "
            "call; leave it out",
            param="parallel_tool_calls",
        )
    if request.json_schema and (request.tools_in_use or request.continue_final_message):
        other = "continue_final_message" if request.continue_final_message else "tools"
        raise UnsupportedParameter(
            f"response_format and {other} are not supported together, because the schema covers the whole completion; "
            "send one of them",
            param="response_format",
        )
    if request.forces_call and request.continue_final_message:
        raise UnsupportedParameter(
            "tool_choice cannot force a call in a message that is continued; send one of tool_choice and "
            "continue_final_message",
            param="tool_choice",
        )


def unsupported_call_error() -> UnsupportedParameter:
    """Return the error for a forced call in a format without a fixed opening."""
    return UnsupportedParameter(
        "tool_choice: a forced call is not supported, because the model's tool format has no fixed opening for it; "
        "give auto or none",
        param="tool_choice",
    )


def _opening_of_call(request: ChatCompletionRequest, template: ChatTemplate) -> str | None:
    name = request.forced_tool
    return template.tool_parser.forced_call(
        None if name is None else template.encoder.mask(name),
        chat_template=str(template.tokenizer.chat_template),
    )


def template_of(request: ChatCompletionRequest, template: ChatTemplate) -> ChatTemplate:
    """Return the chat template with the variables that a request sets.

    `reasoning_effort` is a variable if the template mentions it, and is ignored otherwise.

    Raises:
        ChatTemplateError: The template refuses the variables.
    """
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None and template.mentions("reasoning_effort"):
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return template.with_variables(variables)
