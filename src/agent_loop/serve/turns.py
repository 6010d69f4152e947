"""What a request asks for: its position in the conversation tree, and how the model's turn begins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from agent_loop.chat.messages import settle_system_messages
from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.chat.template import ChatTemplate
from agent_loop.episode import Episode
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.serve.chat import TurnPrefix, begin_turn, conversation_of, split_prefill, template_of
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.completions import ReplyChunk
from agent_loop.serve.conversation_tree import (
    ConversationTree,
    MessageKey,
    TreePosition,
    TurnNode,
    message_keys,
)
from agent_loop.serve.stream_parser import ParsedDelta
from agent_loop.tools.json_schema import InvalidSchema, SchemaValidator
from agent_loop.types import IntArray, Message, SamplingParams


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A turn that a request asks for."""

    request: ChatCompletionRequest
    template: ChatTemplate
    """The chat template with the variables of the request."""
    messages: Sequence[Message]
    """Messages before the turn."""
    keys: Sequence[MessageKey]
    """Keys of all messages of the request."""
    position: TreePosition
    has_moved_system: bool
    """Whether system messages became text of the user."""
    json_schema: str
    """Schema that the program asked for, also if the servers cannot constrain the completion."""
    continued: TurnNode | None = None
    """Cut turn whose tokens are continued; None for a new turn."""
    begun: Message | None = None
    """Last message of the request, if the turn continues it."""
    prefill: str = ""
    """Text of `begun` with which a new turn begins."""


def plan_turn(
    request: ChatCompletionRequest,
    *,
    template: ChatTemplate,
    tree: ConversationTree,
    json_schema: str,
    trusts_call_ids: bool,
) -> TurnPlan:
    """Return the plan of a request's turn.

    With `continue_final_message`, the last message is continued: from the tokens of the turn that it is, if the turn
    was sampled in this session and cut, and otherwise from its text. `TurnPlan` and `ConversationTree.locate` describe
    the other arguments.
    """
    template = template_of(request, template)
    written = conversation_of(request.messages)
    settled = settle_system_messages(written, template)
    messages, keys = tree.with_model_ids(settled), message_keys(settled)
    continues = bool(request.continue_final_message) and messages[-1]["role"] == "assistant"
    *before, last = messages
    if not continues:
        before, _ = split_prefill(request, messages)
    position = tree.locate(
        before,
        keys[: len(before)],
        tools=request.tools_in_use,
        variables=template.variables,
        trusts_call_ids=trusts_call_ids,
    )
    plan = TurnPlan(request, template, before, keys, position, settled != written, json_schema)
    if not continues:
        return plan
    cut = tree.find_cut_turn(position, keys[-1])
    if cut is None:
        _, prefill = split_prefill(request, messages)
        return replace(plan, begun=last, prefill=prefill)
    if last.get("tool_calls"):
        raise RequestError(
            "continue_final_message: the last message has tool calls, and cannot be continued; answer the calls with "
            "tool messages",
            param="continue_final_message",
        )
    return replace(plan, position=tree.position_of_rest(cut), continued=cut, begun=last)


def sampling_params_of(
    request: ChatCompletionRequest, *, defaults: Mapping[str, Any], choice: int
) -> SamplingParams:
    """Return the request's sampling parameters, with the run's values for those that it does not set."""
    params = request.sampling_params(max_tokens=request.max_new_tokens, choice=choice)
    given = {name for name in ("temperature", "top_p", "top_k") if getattr(request, name) is not None}
    unset = {name: value for name, value in defaults.items() if name not in given}
    if params.max_tokens is not None and "max_tokens" in unset:
        unset["max_tokens"] = min(params.max_tokens, unset["max_tokens"])
    return structs.replace(params, **unset)


def beginning_of(plan: TurnPlan, episode: Episode) -> tuple[IntArray, TurnPrefix]:
    """Return the tokens before the turn, and the tokens with which the turn begins."""
    context = episode.context
    if plan.continued is None:
        return context, begin_turn(
            plan.request, template=plan.template, context=context, prefill=plan.prefill
        )
    assert plan.begun is not None
    start, given = episode.last_turn_start, str(plan.begun["content"])
    return context[:start], TurnPrefix.of_tokens(context[start:], template=plan.template, given=given)


def with_model_call_ids(position: TreePosition) -> list[Message]:
    """Return the messages that follow the parent, with the model's own call names and ids in tool messages.

    A client may have changed the ids that it received. It then has its own in the parent's completion too.
    """
    assert position.parent is not None
    sampled, written = position.parent.calls, list[Message]()
    calls = {**dict(zip(position.call_ids, sampled.values(), strict=False)), **sampled}
    for message in position.new_messages:
        call = calls.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and call is not None:
            message = {"role": "tool", "content": message["content"], "name": call.name}
            message |= {"tool_call_id": call.id} if call.id else {}
        written.append(message)
    return written


def sent_message(plan: TurnPlan, chunks: Sequence[ReplyChunk]) -> Message:
    """Return the assistant message of a turn as the client has it, with what the turn continues."""
    delta = ParsedDelta.joined([chunk.delta for chunk in chunks])
    begun = "" if plan.begun is None else str(plan.begun["content"])
    reply = None if plan.continued is None else plan.continued.reply
    calls = [(call_id, call) for chunk in chunks for call_id, call in chunk.calls.items()]
    return {
        "role": "assistant",
        "content": begun + delta.content,
        "reasoning_content": ("" if reply is None else reply.reasoning) + delta.reasoning,
        "tool_calls": [{**call.as_message(), "id": call_id} for call_id, call in calls],
    }


def unmet_demands(plan: TurnPlan, message: Message) -> Iterator[str]:
    """Yield what the message of a turn lacks: a call that the request forced, or JSON that matches its schema."""
    request = plan.request
    if request.forces_call and not message["tool_calls"]:
        name = request.forced_tool or "a tool"
        yield f"tool_choice forces a call of {name}, but the completion has no valid call"
    if plan.json_schema and not message["tool_calls"]:
        fault = _schema_fault(str(message["content"]), json_schema=plan.json_schema)
        if fault is not None:
            yield f"response_format: the completion does not match the schema: {fault}"


def _schema_fault(text: str, *, json_schema: str) -> str | None:
    """Return the first way in which a text does not match a schema; None if it matches."""
    try:
        value = decode_json(text)
    except JsonFault as fault:
        return f"it is not valid JSON: {fault}"
    try:
        errors = SchemaValidator(json.loads(json_schema)).find_errors(value)
    except InvalidSchema as error:
        return f"it cannot be checked: {error}"
    return one_line(errors[0].message, max_length=200) if errors else None
