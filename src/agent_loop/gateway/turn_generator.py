"""Generates the model's turn for one request of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.episode import Completion, Episode, EpisodeStopped
from agent_loop.errors import ChatTemplateError, ServerError
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.conversation_tree import ConversationTree, TurnNode
from agent_loop.gateway.message_keys import message_keys
from agent_loop.gateway.publisher import CompletionPublisher, SentMessage
from agent_loop.gateway.shared_completion import SharedCompletion
from agent_loop.loops.base import LoopContext
from agent_loop.trajectory import IncidentKind
from agent_loop.types import Message, SamplingParams, StopReason, TokenChunk

SAMPLING_FIELDS = ("temperature", "top_p", "top_k")


class TurnGenerator:
    """Adds a request's new messages to the episode of its branch, and samples the completion.

    Args:
        context: Provides the chat template and the time limit of a completion.
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
        self._template = context.template
        self._generate_timeout_s = context.limits.generate_timeout_s
        self._branches = branches
        self._tree = tree
        self._sampling_params = dict(sampling_params)

    async def generate(
        self,
        request: ChatCompletionRequest,
        messages: Sequence[Message],
        *,
        turn: TurnNode,
        shared: SharedCompletion,
    ) -> None:
        """Sample the completion of a turn and publish it to `shared`, chunk by chunk if the request streams.

        Raises:
            EpisodeStopped: A limit allows no further turn, or the completion exceeded its time limit.
            AgentLoopError: The request cannot be rendered, or the server failed.
        """
        await self._add_new_messages(turn, messages, request)
        sent = await self._sample(turn, request, shared)
        turn.after, turn.calls = turn.branch.episode.mark(), sent.calls
        [key] = message_keys([sent.message])
        self._tree.complete(turn, key)

    async def _add_new_messages(
        self, turn: TurnNode, messages: Sequence[Message], request: ChatCompletionRequest
    ) -> None:
        await self._branches.open(turn.branch)
        if turn.before is None and turn.position.parent is not None:
            try:
                new_messages = _with_model_call_ids(turn.position.new_messages, turn.position.parent)
                if not await turn.branch.episode.observe(new_messages):
                    raise EpisodeStopped(StopReason.RESPONSE_LENGTH)
            except ChatTemplateError:
                # The template cannot render the new messages after this turn, but it may render the conversation.
                branch = self._branches.start(messages, tools=request.tools_in_use)
                branch.note_once(turn.branch.noted)
                turn.branch.is_busy, turn.branch = False, branch
                await self._branches.open(branch)
        turn.before = turn.branch.episode.mark()

    async def _sample(
        self, turn: TurnNode, request: ChatCompletionRequest, shared: SharedCompletion
    ) -> SentMessage:
        branch, episode = turn.branch, turn.branch.episode
        num_tokens_before = len(episode.context)
        publisher = CompletionPublisher(
            request,
            shared,
            template=self._template,
            prompt_ids=episode.context,
            turn_name=f"L{branch.number:02}T{episode.assistant_turns:03}",
        )
        on_chunk = publisher.on_chunk if request.stream or request.stops else None
        try:
            completion = await self._completion(episode, self._params(request), on_chunk=on_chunk)
        finally:
            branch.has_sampled_tokens = branch.has_sampled_tokens or len(episode.context) > num_tokens_before
        if completion.sampled.stop_reason == "aborted":
            raise ServerError("the completion was aborted on the server; send the request again")
        sent = publisher.finish(completion)
        for call in completion.parsed.malformed_calls if request.tools_in_use else ():
            episode.note(IncidentKind.MALFORMED_CALL, f"{call.error} in {call.text[:200]!r}")
        return sent

    async def _completion(
        self, episode: Episode, params: SamplingParams, *, on_chunk: Callable[[TokenChunk], bool] | None
    ) -> Completion:
        """Return the completion. Stop the episode if the completion exceeds its time limit."""
        limit = asyncio.timeout(self._generate_timeout_s)
        try:
            async with limit:
                return await episode.generate(params, on_token=on_chunk)
        except TimeoutError:
            if not limit.expired():
                raise
            detail = (
                f"the completion took longer than {self._generate_timeout_s:g} s (rollout.generate_timeout_s)"
            )
            episode.note(IncidentKind.GENERATE_TIMEOUT, detail)
            episode.stop(StopReason.DEADLINE)
            raise EpisodeStopped(StopReason.DEADLINE) from None

    def _params(self, request: ChatCompletionRequest) -> SamplingParams:
        """Return the request's sampling parameters, with the run's values for those that it does not set."""
        params = request.sampling_params(max_tokens=request.max_new_tokens, choice=0)
        given = {name for name in SAMPLING_FIELDS if getattr(request, name) is not None}
        defaults = {name: value for name, value in self._sampling_params.items() if name not in given}
        if params.max_tokens is not None and "max_tokens" in defaults:
            defaults["max_tokens"] = min(params.max_tokens, defaults["max_tokens"])
        return structs.replace(params, **defaults)


def _with_model_call_ids(new_messages: Sequence[Message], parent: TurnNode) -> list[Message]:
    """Return the messages that follow `parent`, with the model's own call names and ids in tool messages."""
    written: list[Message] = []
    for message in new_messages:
        call = parent.calls.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and call is not None:
            message = {"role": "tool", "content": message["content"], "name": call.name}
            message |= {"tool_call_id": call.id} if call.id else {}
        written.append(message)
    return written
