"""What a request asks for: its position in the conversation tree, and how the model's turn begins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from agent_loop.chat.messages import settle_system_messages
from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.chat.template import ChatTemplate
from agent_loop.episode import Completion, Episode, EpisodeStopped
from agent_loop.errors import ChatTemplateError, RequestError, ServerError
from agent_loop.loops.base import LoopContext
from agent_loop.runtime.describe import one_line
from agent_loop.serve.branches import Branches
from agent_loop.serve.chat import (
    TurnPrefix,
    TurnReader,
    begin_turn,
    conversation_of,
    split_prefill,
    template_of,
)
from agent_loop.serve.chat_replies import ParsedChunk
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.conversation_tree import (
    ConversationTree,
    MessageKey,
    TreePosition,
    TurnNode,
    message_keys,
)
from agent_loop.serve.shared_completion import SharedCompletion
from agent_loop.serve.stream_parser import ParsedDelta
from agent_loop.tools.json_schema import InvalidSchema, SchemaValidator
from agent_loop.trajectory import IncidentKind
from agent_loop.types import IntArray, Message, SamplingParams, StopReason, TokenChunk


@dataclass(frozen=True, slots=True)
class WrittenConversation:
    """The conversation of a request."""

    template: ChatTemplate
    """The chat template with the variables of the request."""
    messages: Sequence[Message]
    keys: Sequence[MessageKey]
    has_moved_system: bool
    """Whether system messages became text of the user."""

    @classmethod
    def of(cls, request: ChatCompletionRequest, template: ChatTemplate) -> WrittenConversation:
        """Return the conversation of a request."""
        template = template_of(request, template)
        written = conversation_of(request.messages)
        messages = settle_system_messages(written, template)
        return cls(template, messages, message_keys(messages), messages != written)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A turn that a request asks for."""

    request: ChatCompletionRequest
    template: ChatTemplate
    messages: Sequence[Message]
    """Messages before the turn."""
    position: TreePosition
    continued: TurnNode | None = None
    """Cut turn whose tokens are continued; None for a new turn."""
    begun: Message | None = None
    """Last message of the request, if the turn continues it."""
    prefill: str = ""
    """Text of `begun` with which a new turn begins."""
    json_schema: str = ""
    """Schema that the program asked for, also if the servers cannot constrain the completion."""


def plan_turn(
    request: ChatCompletionRequest,
    written: WrittenConversation,
    tree: ConversationTree,
    *,
    json_schema: str,
    trusts_call_ids: bool = False,
) -> TurnPlan:
    """Return the plan of a request's turn.

    With `continue_final_message`, the last message is continued: from the tokens of the turn that it is, if the turn
    was sampled in this session and cut, and otherwise from its text. `TurnPlan` and `ConversationTree.locate` describe
    the other arguments.
    """
    messages, keys = tree.with_model_ids(written.messages), written.keys
    continues = bool(request.continue_final_message) and messages[-1]["role"] == "assistant"
    *before, last = messages
    if not continues:
        before, _ = split_prefill(request, messages)
    position = tree.locate(
        before,
        keys[: len(before)],
        tools=request.tools_in_use,
        variables=written.template.variables,
        trusts_call_ids=trusts_call_ids,
    )
    plan = TurnPlan(request, written.template, before, position, json_schema=json_schema)
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


SAMPLING_FIELDS = ("temperature", "top_p", "top_k")


class TurnGenerator:
    """Adds a request's new messages to the episode of its branch, and samples the completion."""

    def __init__(
        self,
        context: LoopContext,
        *,
        branches: Branches,
        tree: ConversationTree,
        sampling_params: Mapping[str, Any],
    ) -> None:
        self._generate_timeout_s = context.limits.generate_timeout_s
        self._branches = branches
        self._tree = tree
        self._sampling_params = dict(sampling_params)

    async def generate(
        self, plan: TurnPlan, *, turn: TurnNode, shared: SharedCompletion, choice: int
    ) -> None:
        """Sample a completion of a turn and publish it to `shared`, chunk by chunk if the request streams."""
        await self._add_new_messages(turn, plan)
        await self._sample(turn, plan, shared, choice=choice)
        episode, message = turn.branch.episode, _sent_message(plan, shared.chunks)
        for detail in unmet_demands(plan, message):
            episode.note(IncidentKind.UNMET_REQUEST, detail)
        turn.after, turn.is_open = episode.mark(), episode.ends_in_open_turn
        turn.calls = {call_id: call for chunk in shared.chunks for call_id, call in chunk.calls.items()}
        [key] = message_keys([message])
        self._tree.complete(turn, key)

    async def _add_new_messages(self, turn: TurnNode, plan: TurnPlan) -> None:
        await self._branches.open(turn.branch)
        if turn.before is None and turn.position.parent is not None:
            try:
                new_messages = with_model_call_ids(turn.position)
                if not await turn.branch.episode.observe(new_messages):
                    raise EpisodeStopped(StopReason.RESPONSE_LENGTH)
            except ChatTemplateError:
                # The template cannot render the new messages after this turn, but it may render the conversation.
                tools = plan.request.tools_in_use
                branch = self._branches.start(plan.messages, template=plan.template, tools=tools)
                branch.note_once(turn.branch.noted)
                turn.branch.is_busy, turn.branch = False, branch
                await self._branches.open(branch)
        turn.before = turn.branch.episode.mark()

    async def _sample(self, turn: TurnNode, plan: TurnPlan, shared: SharedCompletion, *, choice: int) -> None:
        request, branch, episode = plan.request, turn.branch, turn.branch.episode
        context, prefix = _beginning(plan, episode)
        num_tokens_before = len(episode.context)
        # Ids of calls stay the same when the turn is replayed. Some chat templates accept only ids of nine letters and
        # digits, which these are with fewer than 100 branches, 1,000 turns and 10 calls.
        turn_name = f"L{branch.number:02}T{episode.assistant_turns:03}"
        reader = TurnReader(
            request,
            template=plan.template,
            context=context,
            prefix=prefix,
            index=choice,
            new_call_id=lambda position: f"{turn_name}C{position}",
        )

        def publish(chunk: TokenChunk) -> bool:
            """Publish a chunk of tokens. Return whether the server should continue sampling."""
            if chunk.stop_reason == "aborted":
                return True
            for parsed in reader.read(chunk):
                shared.add(parsed)
                if parsed.decoded.finish_reason is not None:
                    return chunk.stop_reason is not None
            return True

        generate = partial(
            episode.generate,
            self._params(request, choice=choice),
            on_token=publish if request.stream or reader.is_token_by_token else None,
            prefix=() if plan.continued else prefix.token_ids,
            continues_turn=plan.continued is not None,
        )
        try:
            completion = await self._completion(episode, generate)
        finally:
            branch.has_sampled_tokens = branch.has_sampled_tokens or len(episode.context) > num_tokens_before
        if completion.sampled.stop_reason == "aborted":
            raise ServerError("the completion was aborted on the server; send the request again")
        if not shared.chunks:
            for chunk in completion.sampled.chunks:
                publish(chunk)
        for call in completion.parsed.malformed_calls if request.tools_in_use else ():
            episode.note(IncidentKind.MALFORMED_CALL, f"{call.error} in {call.text[:200]!r}")

    async def _completion(
        self, episode: Episode, generate: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """Return the completion. Stop the episode if the completion exceeds its time limit."""
        limit = asyncio.timeout(self._generate_timeout_s)
        try:
            async with limit:
                return await generate()
        except TimeoutError:
            if not limit.expired():
                raise
            detail = (
                f"the completion took longer than {self._generate_timeout_s:g} s (rollout.generate_timeout_s)"
            )
            episode.note(IncidentKind.GENERATE_TIMEOUT, detail)
            episode.stop(StopReason.DEADLINE)
            raise EpisodeStopped(StopReason.DEADLINE) from None

    def _params(self, request: ChatCompletionRequest, *, choice: int) -> SamplingParams:
        """Return the request's sampling parameters, with the run's values for those that it does not set."""
        params = request.sampling_params(max_tokens=request.max_new_tokens, choice=choice)
        given = {name for name in SAMPLING_FIELDS if getattr(request, name) is not None}
        defaults = {name: value for name, value in self._sampling_params.items() if name not in given}
        if params.max_tokens is not None and "max_tokens" in defaults:
            defaults["max_tokens"] = min(params.max_tokens, defaults["max_tokens"])
        return structs.replace(params, **defaults)


def _beginning(plan: TurnPlan, episode: Episode) -> tuple[IntArray, TurnPrefix]:
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


def _sent_message(plan: TurnPlan, chunks: Sequence[ParsedChunk]) -> Message:
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
