"""Generates the model's turn for one request of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from msgspec import structs

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.turn_prefix import TurnPrefix, begin_turn
from agent_loop.episode import Completion, Episode, EpisodeStopped
from agent_loop.errors import ChatTemplateError, ServerError
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.conversation_tree import ConversationTree, TreePosition, TurnNode
from agent_loop.gateway.message_keys import message_keys
from agent_loop.gateway.publisher import CompletionPublisher, SentMessage
from agent_loop.gateway.shared_completion import SharedCompletion
from agent_loop.gateway.turn_plan import TurnPlan
from agent_loop.gateway.unmet_demands import unmet_demands
from agent_loop.loops.base import LoopContext
from agent_loop.trajectory import IncidentKind
from agent_loop.types import IntArray, Message, SamplingParams, StopReason

SAMPLING_FIELDS = ("temperature", "top_p", "top_k")


class TurnGenerator:
    """Adds a request's new messages to the episode of its branch, and samples the completion.

    Args:
        context: Provides the time limit of a completion.
        branches: Branches of the session.
        tree: Conversation tree of the session; receives each finished turn.
        sampling_params: Defaults for parameters that a request does not set.
    """

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
        """Sample a completion of a turn and publish it to `shared`, chunk by chunk if the request streams.

        Args:
            plan: What the request asks for.
            turn: The turn, with its branch.
            shared: Receives the completion.
            choice: Index of the completion in the response.

        Raises:
            EpisodeStopped: A limit allows no further turn, or the completion exceeded its time limit.
            AgentLoopError: The request cannot be rendered, or the server failed.
        """
        await self._add_new_messages(turn, plan)
        sent = await self._sample(turn, plan, shared, choice=choice)
        episode = turn.branch.episode
        turn.after, turn.calls, turn.is_open = episode.mark(), sent.calls, episode.ends_in_open_turn
        [key] = message_keys([sent.message])
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

    async def _sample(
        self, turn: TurnNode, plan: TurnPlan, shared: SharedCompletion, *, choice: int
    ) -> SentMessage:
        request, branch, episode = plan.request, turn.branch, turn.branch.episode
        context, prefix = _beginning(plan, episode)
        num_tokens_before = len(episode.context)
        publisher = CompletionPublisher(
            request,
            shared,
            template=plan.template,
            context=context,
            prefix=prefix,
            turn_name=f"L{branch.number:02}T{episode.assistant_turns:03}",
            index=choice,
        )
        generate = partial(
            episode.generate,
            self._params(request, choice=choice),
            on_token=publisher.on_chunk if publisher.is_needed_per_token else None,
            prefix=() if plan.continued else prefix.token_ids,
            continues_turn=plan.continued is not None,
        )
        try:
            completion = await self._completion(episode, generate)
        finally:
            branch.has_sampled_tokens = branch.has_sampled_tokens or len(episode.context) > num_tokens_before
        if completion.sampled.stop_reason == "aborted":
            raise ServerError("the completion was aborted on the server; send the request again")
        reply = None if plan.continued is None else plan.continued.reply
        reasoning = "" if reply is None else reply.reasoning
        sent = publisher.finish(completion, begun=plan.begun, reasoning=reasoning)
        for call in completion.parsed.malformed_calls if request.tools_in_use else ():
            episode.note(IncidentKind.MALFORMED_CALL, f"{call.error} in {call.text[:200]!r}")
        for detail in unmet_demands(plan, sent.message):
            episode.note(IncidentKind.UNMET_REQUEST, detail)
        return sent

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
    """Return the tokens before the turn, and the tokens with which the turn begins.

    Raises:
        RequestError: The turn cannot begin as the request demands.
    """
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
