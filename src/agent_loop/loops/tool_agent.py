"""The tool loop: the model, its tools and an optional interaction, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from agent_loop.episode import Completion, Episode, EpisodeStopped
from agent_loop.errors import EpisodeError, ToolBug
from agent_loop.interactions.registry import read_interaction_name
from agent_loop.loops.agent_data import AgentData, current_agent_data
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.runtime.describe import describe_value
from agent_loop.tools.base import ToolResponse
from agent_loop.tools.registry import kwargs_of_selected, select_tools, with_row_columns
from agent_loop.tools.results import truncate_tokens
from agent_loop.trajectory import AgentLoopOutput, Failure, IncidentKind
from agent_loop.types import AgentState, MalformedCall, Message, Row, StopReason, ToolCall

MAX_MALFORMED_REPLIES = 8
"""Malformed calls of a turn that get a reply of their own. One reply states the number of the rest."""


@register("tool_agent")
@register("tool_agent_loop")
class ToolAgentLoop(AgentLoopBase):
    """The model, its tools and an optional interaction, as a state machine.

    PENDING -> GENERATING -> PROCESSING_TOOLS or INTERACTING -> GENERATING ... -> TERMINATED. A completion with calls
    goes to the tools. A completion without calls goes to the row's interaction, if the row names one; otherwise it is
    the answer.

    Each state has a handler, which returns the next state. A subclass may override any handler: read the trajectory
    from `agent_data`, change it with the methods of `agent_data.episode`, and call `super()` for the rest.
    """

    agent_data_class: ClassVar[type[AgentData]] = AgentData
    agent_data: AgentData | None = None
    """State of the trajectory. None before `run`."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        self._invalid_turns = 0
        self.state = state = AgentState.PENDING
        self.agent_data = self._new_agent_data(row)
        current_agent_data.set(self.agent_data)
        async with self.agent_data as agent_data:
            while state is not AgentState.TERMINATED:
                self.state = agent_data.state = state
                if state is AgentState.GENERATING:
                    state = await self._handle_generating_state(agent_data, sampling_params)
                elif state is AgentState.PROCESSING_TOOLS:
                    state = await self._handle_processing_tools_state(agent_data)
                elif state is AgentState.INTERACTING:
                    state = await self._handle_interacting_state(agent_data)
                elif state is AgentState.PENDING:
                    state = await self._handle_pending_state(agent_data, sampling_params)
                else:
                    raise EpisodeError(
                        f"a handler of {type(self).__name__} returned {describe_value(state)}; return an AgentState"
                    )
            self.state = agent_data.state = state
            await agent_data.episode.finish()
            return self._with_rewards(agent_data.episode.output())

    def unfinished_output(
        self, reason: StopReason, *, failure: Failure | None = None
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        left = super().unfinished_output(reason, failure=failure)
        return self._with_rewards(left) if isinstance(left, AgentLoopOutput) else left

    # -- handlers, one for each state ------------------------------------------------------------------------------

    async def _handle_pending_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        """Handle PENDING: open the episode, which renders `agent_data.messages` as the prompt."""
        episode = self.episode(
            agent_data.messages,
            tools=agent_data.tools,
            tools_kwargs=agent_data.tools_kwargs,
            interaction_kwargs=agent_data.interaction_kwargs,
        )
        await agent_data.open(episode)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any]
    ) -> AgentState:
        """Handle GENERATING: sample one assistant turn and select the next state.

        On the last turn that the limits allow, sampling stops as soon as the model opens a call, which could not run.
        """
        episode = agent_data.episode
        stop_token_ids = self.template.call_start_ids() if episode.is_last_turn and episode.has_tools else ()
        completion = await episode.generate(sampling_params, stop_token_ids=stop_token_ids)
        agent_data.completion = completion
        if episode.stop_reason is StopReason.CANCELLED:
            raise EpisodeStopped(episode.stop_reason)
        return self._after(completion, episode)

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Handle PROCESSING_TOOLS: run the calls, and give the model a reply to each, in the order of the calls.

        The reply to a call that cannot run states the reason. At most `MAX_MALFORMED_REPLIES` malformed calls get a
        reply of their own.
        """
        episode, completion = agent_data.episode, agent_data.completion
        if completion is None:
            raise EpisodeError("PROCESSING_TOOLS comes after an assistant turn; return GENERATING first")
        calls = completion.parsed.tool_calls
        self._invalid_turns = 0 if calls else self._invalid_turns + 1
        if not calls:
            episode.note(
                IncidentKind.INVALID_TURN, f"only malformed calls, in {self._invalid_turns} turns in a row"
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
                if num_malformed <= MAX_MALFORMED_REPLIES:
                    replies.append(self._reply(f"Error: {call.error}", episode))
            else:
                result = next(results)
                replies.append(self._tool_message(result.response, episode, call=call))
                is_finished = is_finished or result.response.ends_episode
        if num_malformed > MAX_MALFORMED_REPLIES:
            more = num_malformed - MAX_MALFORMED_REPLIES
            replies.append(self._reply(f"Error: {more} more calls cannot be read either", episode))
        if is_finished:
            return self._end(episode, StopReason.TOOL_FINISHED, replies)
        if self._invalid_turns > self.context.multi_turn.max_invalid_turns:
            return self._end(episode, StopReason.MAX_INVALID_TURNS, replies)
        return await self._observe(episode, replies)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        """Handle INTERACTING: give the model the interaction's reply, or end the trajectory with it."""
        episode = agent_data.episode
        reply = await episode.interact()
        message: Message = {"role": "user", "content": reply.content}
        if reply.is_over:
            return self._end(episode, StopReason.INTERACTION_FINISHED, [message] if reply.content else [])
        return await self._observe(episode, [message])

    # -- inside ----------------------------------------------------------------------------------------------------

    def _new_agent_data(self, row: Row) -> AgentData:
        tools = select_tools(self.context.tools, row.get("tool_selection"), where="tool_selection")
        tools_kwargs = kwargs_of_selected(row.get("tools_kwargs"), tools=tools, known=self.context.tools)
        interaction_kwargs, known = row.get("interaction_kwargs"), self.context.interactions
        name = read_interaction_name(interaction_kwargs, known=known, where="interaction_kwargs")
        return self.agent_data_class(
            row["raw_prompt"],
            tools=tools,
            tools_kwargs=with_row_columns(tools_kwargs, tools=tools, row=row),
            interaction=None if name is None else known[name],
            interaction_kwargs=interaction_kwargs,
        )

    def _with_rewards(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Add the handlers' `extra_fields`, and the rewards under verl's names."""
        fields = {} if self.agent_data is None else self.agent_data.extra_fields
        rewards = {"turn_scores": list(output.turn_scores), "tool_rewards": list(output.tool_rewards)}
        return output.with_extra_fields({**fields, **rewards})

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

    async def _observe(self, episode: Episode, messages: Sequence[Message]) -> AgentState:
        was_added = await episode.observe(messages)
        return AgentState.GENERATING if was_added and episode.stop_reason is None else AgentState.TERMINATED

    def _end(self, episode: Episode, reason: StopReason, last_messages: Sequence[Message]) -> AgentState:
        for message in last_messages:
            episode.record_message(message)
        episode.stop(reason)
        return AgentState.TERMINATED

    def _tool_message(self, response: ToolResponse, episode: Episode, *, call: ToolCall) -> Message:
        """Return a tool's response as a message, with images and videos before the text."""
        reply = self._reply(response.text or "", episode, call=call)
        if not (response.image or response.video):
            return reply
        media = [("image", image) for image in response.image or ()]
        media += [("video", video) for video in response.video or ()]
        for kind, _ in media:
            if kind not in self.template.media_kinds:
                known = " and ".join(["text", *sorted(self.template.media_kinds)])
                raise ToolBug(
                    f"tool {call.name!r} returned {'an image' if kind == 'image' else 'a video'}, but this model "
                    f"accepts only {known}; return text"
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
