"""Has the model speak in a turn."""

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
    """Brings a turn's lane to where the model is to speak, and the model to speak.

    Args:
        context: The template, and the time limit of a completion.
        lanes: Of the session.
        tree: Takes what was said.
        sampling_params: Of requests that do not say.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        lanes: Branches,
        tree: ConversationTree,
        sampling_params: Mapping[str, Any],
    ) -> None:
        self._template = context.template
        self._generate_timeout_s = context.limits.generate_timeout_s
        self._lanes = lanes
        self._tree = tree
        self._sampling_params = dict(sampling_params)

    async def answer(
        self,
        request: ChatCompletionRequest,
        messages: Sequence[Message],
        *,
        turn: TurnNode,
        answer: SharedCompletion,
    ) -> None:
        """Hands what the model says to the answer while it says it.

        Raises:
            EpisodeStopped: A limit allows no further turn, or the completion took too long.
            AgentLoopError: The request cannot be rendered, or the server failed it.
        """
        await self._reach(turn, messages, request)
        said = await self._speak(turn, request, answer)
        turn.after, turn.calls = turn.lane.episode.mark(), said.calls
        [link] = message_keys([said.message])
        self._tree.complete(turn, link)

    async def _reach(
        self, turn: TurnNode, messages: Sequence[Message], request: ChatCompletionRequest
    ) -> None:
        await self._lanes.open(turn.lane)
        if turn.before is None and turn.place.parent is not None:
            try:
                added = _for_episode(turn.place.added, turn.place.parent)
                if not await turn.lane.episode.observe(added):
                    raise EpisodeStopped(StopReason.RESPONSE_LENGTH)
            except ChatTemplateError:
                # What was added cannot be written behind a turn, but perhaps in a conversation as a whole.
                lane = self._lanes.new(messages, tools=request.tools_in_use)
                turn.lane.is_busy, turn.lane = False, lane
                await self._lanes.open(lane)
        turn.before = turn.lane.episode.mark()

    async def _speak(
        self, turn: TurnNode, request: ChatCompletionRequest, answer: SharedCompletion
    ) -> SentMessage:
        lane, episode = turn.lane, turn.lane.episode
        num_before = len(episode.context)
        voice = CompletionPublisher(
            request,
            answer,
            template=self._template,
            prompt_ids=episode.context,
            turn_name=f"L{lane.number:02}T{episode.assistant_turns:03}",
        )
        hear = voice.hear if request.stream or request.stops else None
        try:
            completion = await self._completion(episode, self._params(request), hear=hear)
        finally:
            lane.has_sampled_tokens = lane.has_sampled_tokens or len(episode.context) > num_before
        if completion.sampled.stop_reason == "aborted":
            raise ServerError("the completion was aborted on the server; send it again")
        said = voice.finish(completion)
        for call in completion.parsed.malformed_calls if request.tools_in_use else ():
            episode.note(IncidentKind.MALFORMED_CALL, f"{call.error} in {call.text[:200]!r}")
        return said

    async def _completion(
        self, episode: Episode, params: SamplingParams, *, hear: Callable[[TokenChunk], bool] | None
    ) -> Completion:
        """What the model says within the time limit; the episode is over if it takes longer."""
        limit = asyncio.timeout(self._generate_timeout_s)
        try:
            async with limit:
                return await episode.generate(params, hear=hear)
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
        """As the request says, and where it does not, as the run does."""
        params = request.sampling_params(max_tokens=request.max_new_tokens, choice=0)
        given = {name for name in SAMPLING_FIELDS if getattr(request, name) is not None}
        ours = {name: value for name, value in self._sampling_params.items() if name not in given}
        if params.max_tokens is not None and "max_tokens" in ours:
            ours["max_tokens"] = min(params.max_tokens, ours["max_tokens"])
        return structs.replace(params, **ours)


def _for_episode(added: Sequence[Message], parent: TurnNode) -> list[Message]:
    """Messages behind a turn; tool messages name the call as the model wrote it."""
    written: list[Message] = []
    for message in added:
        call = parent.calls.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and call is not None:
            message = {"role": "tool", "content": message["content"], "name": call.name}
            message |= {"tool_call_id": call.id} if call.id else {}
        written.append(message)
    return written
