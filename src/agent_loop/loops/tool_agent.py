"""The model, its tools and an optional simulated user, in turns."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from agent_loop.episode import Completion, Episode, EpisodeStopped
from agent_loop.errors import ToolBug
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.selection import kwargs_of_selected, select_tools
from agent_loop.tools.truncation import truncate_tokens
from agent_loop.trajectory import AgentLoopOutput, IncidentKind
from agent_loop.types import AgentState, MalformedCall, Message, SamplingParams, StopReason, ToolCall

MAX_MALFORMED_ANSWERS = 8
"""So many of a turn's malformed calls are answered one by one; the rest, with their number."""


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """PENDING -> GENERATING -> PROCESSING_TOOLS or INTERACTING -> GENERATING ... -> TERMINATED.

    A completion with calls goes to the tools; one without goes to the row's interaction, if it names one; otherwise
    it is the answer. Each state is one method that returns the next.
    """

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        self._invalid_turns = 0
        self.state = AgentState.PENDING
        tools = select_tools(self.context.tools, row.get("tool_selection"), where="tool_selection")
        async with self.episode(
            row["raw_prompt"],
            tools=tools,
            tools_kwargs=kwargs_of_selected(row.get("tools_kwargs"), tools=tools, known=self.context.tools),
            interaction_kwargs=row.get("interaction_kwargs"),
        ) as episode:
            self._sampling_params = SamplingParams.parse(sampling_params)
            self.state = AgentState.GENERATING
            while self.state is not AgentState.TERMINATED:
                completion = await self._generate(episode)
                if episode.stop_reason is StopReason.CANCELLED:
                    raise EpisodeStopped(episode.stop_reason)
                self.state = self._after(completion, episode)
                if self.state is AgentState.PROCESSING_TOOLS:
                    self.state = await self._process_tools(episode, completion)
                elif self.state is AgentState.INTERACTING:
                    self.state = await self._interact(episode)
            await episode.finish()
            return episode.output()

    def _generate(self, episode: Episode) -> Awaitable[Completion]:
        """On the last turn that the limits allow, the model is stopped as soon as it opens a call: nobody could run
        it."""
        stop_token_ids = self.template.call_start_ids() if episode.is_last_turn and episode.has_tools else ()
        return episode.generate(self._sampling_params, stop_token_ids=stop_token_ids)

    def _after(self, completion: Completion, episode: Episode) -> AgentState:
        if completion.calls:
            if episode.may_go_on():
                return AgentState.PROCESSING_TOOLS
            for call in completion.calls:
                episode.note(IncidentKind.UNEXECUTED_CALL, f"{_described(call)}: {episode.stop_reason}")
        elif completion.is_cut:
            episode.stop(StopReason.RESPONSE_LENGTH)
        elif episode.has_interaction and episode.stop_reason is None:
            return AgentState.INTERACTING
        return AgentState.TERMINATED

    async def _process_tools(self, episode: Episode, completion: Completion) -> AgentState:
        """Every call is answered, in the order in which they were written; one that cannot be run, with the reason. Of
        those that cannot be read, the first are."""
        calls = completion.parsed.tool_calls
        self._invalid_turns = 0 if calls else self._invalid_turns + 1
        if not calls:
            episode.note(
                IncidentKind.INVALID_TURN, f"nothing but malformed calls, {self._invalid_turns} in a row"
            )
        results = iter(
            await episode.call_tools(calls, max_parallel=self.context.multi_turn.max_parallel_calls)
        )
        replies: list[Message] = []
        num_malformed, is_finished = 0, False
        for call in completion.calls:
            if isinstance(call, MalformedCall):
                num_malformed += 1
                episode.note(IncidentKind.MALFORMED_CALL, f"{call.error} in {call.text[:200]!r}")
                if num_malformed <= MAX_MALFORMED_ANSWERS:
                    replies.append(self._reply(f"Error: {call.error}", episode))
            else:
                result = next(results)
                replies.append(self._answer(result.response, episode, call=call))
                is_finished = is_finished or result.response.ends_episode
        if num_malformed > MAX_MALFORMED_ANSWERS:
            more = num_malformed - MAX_MALFORMED_ANSWERS
            replies.append(self._reply(f"Error: {more} more calls cannot be read either", episode))
        if is_finished:
            return self._end(episode, StopReason.TOOL_FINISHED, replies)
        if self._invalid_turns > self.context.multi_turn.max_invalid_turns:
            return self._end(episode, StopReason.MAX_INVALID_TURNS, replies)
        return await self._observe(episode, replies)

    async def _interact(self, episode: Episode) -> AgentState:
        reply = await episode.interact()
        message: Message = {"role": "user", "content": reply.content}
        if reply.is_over:
            return self._end(episode, StopReason.INTERACTION_FINISHED, [message] if reply.content else [])
        return await self._observe(episode, [message])

    async def _observe(self, episode: Episode, messages: Sequence[Message]) -> AgentState:
        was_added = await episode.observe(messages)
        return AgentState.GENERATING if was_added and episode.stop_reason is None else AgentState.TERMINATED

    def _end(self, episode: Episode, reason: StopReason, last_words: Sequence[Message]) -> AgentState:
        for message in last_words:
            episode.record_message(message)
        episode.stop(reason)
        return AgentState.TERMINATED

    def _answer(self, response: ToolResponse, episode: Episode, *, call: ToolCall) -> Message:
        """A tool's answer; images and videos come before its text."""
        reply = self._reply(response.text or "", episode, call=call)
        if not (response.image or response.video):
            return reply
        media = [("image", image) for image in response.image or ()]
        media += [("video", video) for video in response.video or ()]
        for kind, _ in media:
            if kind not in self.template.media_kinds:
                known = " and ".join(["text", *sorted(self.template.media_kinds)])
                raise ToolBug(
                    f"tool {call.name!r} answered with {'an image' if kind == 'image' else 'a video'}; "
                    f"only {known} reaches this model"
                )
        parts: list[Message] = [{"type": kind, kind: source} for kind, source in media]
        text = [{"type": "text", "text": reply["content"]}] if reply["content"] else []
        return {**reply, "content": parts + text}

    def _reply(self, text: str, episode: Episode, *, call: ToolCall | None = None) -> Message:
        config = self.context.multi_turn
        kept, was_truncated = truncate_tokens(
            text,
            max_tokens=config.max_tool_response_length,
            side=config.tool_response_truncate_side,
            encode=self.template.encode,
            decode=self.template.decode,
        )
        if was_truncated:
            limit = config.max_tool_response_length
            episode.note(
                IncidentKind.TRUNCATED_REPLY, f"a reply of {len(text)} characters was cut to {limit} tokens"
            )
        reply: Message = {"role": "tool", "content": kept}
        if call is not None:
            reply |= {"name": call.name, **({"tool_call_id": call.id} if call.id else {})}
        return reply


def _described(call: ToolCall | MalformedCall) -> str:
    return f"call of {call.name!r}" if isinstance(call, ToolCall) else "an unfinished call"
