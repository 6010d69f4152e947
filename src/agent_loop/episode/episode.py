"""Episode: the state of one running trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

import numpy as np
from msgspec import structs

from agent_loop.chat.template import ChatTemplate
from agent_loop.environments.base import Reply
from agent_loop.environments.live import LiveEnvironment
from agent_loop.episode.deadlines import Deadlines, Stopwatch, TimeLimit
from agent_loop.episode.environment import TrajectoryEnvironment
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.episode.sampling import TurnRequest, TurnSampler
from agent_loop.episode.transcript import Transcript
from agent_loop.episode.turns import Completion, EpisodeMark, EpisodeStopped
from agent_loop.errors import EpisodeError
from agent_loop.recording.row_log import EpisodeLog, RowLog
from agent_loop.runtime.concurrency import CallAborted
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.tools.session import ToolResult, ToolSession
from agent_loop.trajectory import AgentLoopOutput, Failure, Feedback, IncidentKind, Segment
from agent_loop.trajectory.copying import copied
from agent_loop.types import (
    IntArray,
    Message,
    SamplingParams,
    StopReason,
    TokenChunk,
    TokenIds,
    TokenOutput,
    ToolCall,
    as_token_ids,
)

ResultT = TypeVar("ResultT")


class Episode:
    """One running trajectory. Only the episode adds tokens to the trajectory, and the episode enforces its limits.

    Single use, with `async with`. Entering renders the prompt. Leaving closes the tools and the interaction, also after
    an exception.

    A loop calls `generate`, `observe`, `call_tools`, `interact`, `finish` and `output`. After the episode is over,
    `generate` and `observe` raise `EpisodeStopped`. A loop need not catch it: the worker returns the trajectory's
    record.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        template: ChatTemplate,
        server_manager: AsyncLLMServerManager,
        limits: EpisodeLimits,
        tools: ToolSession | None = None,
        tool_schemas: Sequence[Mapping[str, Any]] = (),
        interaction: LiveEnvironment | None = None,
        request_id: str | None = None,
        log: EpisodeLog | None = None,
        cancellation: asyncio.Event | None = None,
    ) -> None:
        self.request_id = request_id or uuid4().hex
        self.limits = limits
        self.stop_reason: StopReason | None = None
        self._transcript = Transcript(messages, template=template, tool_schemas=tool_schemas)
        self._template = template
        self._server_manager = server_manager
        if server_manager.decode is None:
            server_manager.decode = template.encoder.decode
        self._cancelled = cancellation
        self._log = log or RowLog("trajectory").new_episode()
        self._sampler = TurnSampler(server_manager, request_id=self.request_id, event=cancellation)
        self._environment = TrajectoryEnvironment(
            tools=tools, interaction=interaction, log=self._log, cancellation=cancellation
        )
        self._stopwatch = Stopwatch()
        self._deadlines = Deadlines()
        self._is_closed = False
        self._is_abandoned = False

    # -- start and end ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._stopwatch.start()
        await self._deadlines.__aenter__()
        if self.limits.deadline_s is not None:
            self._deadlines.begin(TimeLimit.TRAJECTORY, seconds=self.limits.deadline_s)
        try:
            await self._open()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._deadlines.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self._deadlines.incident is not None:
                self.note(*self._deadlines.incident)
            await self.finish(StopReason.DEADLINE)
            raise EpisodeStopped(StopReason.DEADLINE) from None
        if error is None or isinstance(error, EpisodeStopped):
            await self.finish()
        elif isinstance(error, asyncio.CancelledError):
            await self._close(StopReason.CANCELLED)
        else:
            await self._close(StopReason.FAILED)

    async def finish(self, reason: StopReason = StopReason.ANSWERED) -> None:
        """End the episode: collect the rewards of tools and interaction, and close both.

        No rewards are collected if the episode was cancelled. A second call does nothing.

        Args:
            reason: Stop reason; ignored if the episode has a stop reason already.

        Raises:
            ToolBug: A tool's `calc_reward` raised or exceeded its time limit.
            EnvironmentBug: The interaction's `calculate_score` raised or exceeded its time limit.
        """
        if self._is_closed:
            return
        self.stop(reason)
        self._deadlines.end(TimeLimit.TURN)
        try:
            if self.stop_reason is StopReason.CANCELLED:
                await self._environment.keep_verdicts()
            else:
                await self._environment.collect_verdicts(self._transcript.messages)
        finally:
            await self._close(reason)

    async def abandon(self, reason: StopReason) -> None:
        """End the episode from outside the loop that entered it, because the worker no longer waits for the loop.

        Later calls of the loop raise. Does nothing if the episode has ended.
        """
        self._is_abandoned = True
        await self._close(reason)

    # -- steps -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        sampling_params: Mapping[str, Any] | SamplingParams,
        *,
        stop_token_ids: Sequence[int] = (),
        on_token: Callable[[TokenChunk], bool] | None = None,
        prefix: TokenIds = (),
        continues_turn: bool = False,
    ) -> Completion:
        """Sample one assistant turn, or continue the last one.

        The episode ends if the turn is aborted or cut by `response_length`. The episode continues if the turn is cut by
        `max_turn_tokens`: the next `observe` adds the missing end of the turn.

        Args:
            sampling_params: See `SamplingParams`. `max_tokens` is lowered to the tokens that the limits leave.
            stop_token_ids: Additional stop tokens for this turn only.
            on_token: Called with each sampled token; returns whether to continue. The turn ends with the token for
                which it returns False. Not called for a turn that is replayed from the log.
            prefix: Tokens with which the turn begins. The model continues them, they count as response tokens, and
                they are not trained on. `ChatTemplate.encode` returns the tokens of a text.
            continues_turn: Continue the tokens of the last turn, which was cut. The limits count the continuation as a
                turn of its own.

        Raises:
            EpisodeStopped: The episode is over, or a limit allows no further turn.
            EpisodeError: `continues_turn` is set, and the last tokens do not belong to a turn that was cut.
            ServerError: The server failed.
        """
        self._refuse_if_over()
        if continues_turn and not self._transcript.ends_in_open_turn:
            raise EpisodeError(
                "the last turn is complete or was followed by a reply, and cannot be continued"
            )
        limits, ledger = self.limits, self._transcript.ledger
        used = ledger.num_response_tokens + len(prefix)
        forbidden = limits.forbids_turn(assistant_turns=self._transcript.assistant_turns, num_tokens=used)
        if forbidden is not None:
            raise self._stopped(forbidden)
        params = limits.applied(
            SamplingParams.parse(sampling_params), num_tokens=used, stop_token_ids=stop_token_ids
        )
        context = np.concatenate([ledger.context, as_token_ids(prefix)]) if len(prefix) else ledger.context
        # The log gets the parameters without the seed. A replayed completion uses up a seed too, so that later turns
        # have the same seeds as without replay.
        seed = self._server_manager.next_seed(context) if params.seed is None else params.seed
        turn = TurnRequest(context, structs.replace(params, seed=seed), ledger.attachments, on_token)
        if limits.turn_timeout_s is not None:
            self._deadlines.begin(TimeLimit.TURN, seconds=limits.turn_timeout_s)
        if limits.generate_timeout_s is not None:
            self._deadlines.begin(TimeLimit.GENERATE, seconds=limits.generate_timeout_s)
        record = partial(self._record_turn, params=params, prefix=prefix, continues_turn=continues_turn)
        sample = partial(self._sampler.sample, turn, keep_partial=record)
        now = self._stopwatch.now
        began_at = now()
        try:
            sampled = await self._log.completion(
                params, num_context=len(ledger), prefix=prefix, sample=sample
            )
        except CallAborted:
            raise self._stopped(StopReason.CANCELLED) from None
        finally:
            self._stopwatch.count("generate_sequences", now() - began_at)
            if limits.generate_timeout_s is not None:
                self._deadlines.end(TimeLimit.GENERATE)
        completion = record(sampled)
        if sampled.stop_reason == "aborted":
            self.stop(StopReason.CANCELLED)
        elif self.num_tokens_left <= 0 and (completion.is_cut or completion.calls):
            self.stop(StopReason.RESPONSE_LENGTH)
        return completion

    async def observe(self, messages: Sequence[Message]) -> bool:
        """Add messages of tools, a user or an environment, to which the model replies next.

        Returns:
            Whether the messages were added. Messages that exceed `response_length` are not added, and the episode ends.
            The episode also ends if the messages fill `response_length` exactly.

        Raises:
            EpisodeStopped: The episode is over, or a limit allows no further turn.
            ChatTemplateError: The template does not accept the messages. The episode is unchanged.
        """
        self._refuse_if_over()
        if not self.may_go_on():
            raise EpisodeStopped(self.stop_reason or StopReason.FAILED)
        encoded = await self._log.tokens(messages, encode=partial(self._transcript.encoded_reply, messages))
        left = self.num_tokens_left
        was_added = self._transcript.add_reply(messages, encoded, max_tokens=left)
        if len(encoded.token_ids) >= left:
            self.stop(StopReason.RESPONSE_LENGTH)
        if was_added:
            self._deadlines.end(TimeLimit.TURN)
        return was_added

    async def call_tools(self, calls: Sequence[ToolCall], *, max_parallel: int = 1) -> list[ToolResult]:
        """Run calls on the trajectory's own tool instances and record their rewards.

        Args:
            calls: Calls to run.
            max_parallel: Maximum number of calls that run concurrently; the rest are queued.

        Returns:
            One result per call, in order.

        Raises:
            EpisodeStopped: The episode was cancelled before all calls had ended.
            ToolBug: A tool raised an exception other than `ToolError`. The other calls are cancelled.
        """
        self._stopwatch.count("num_tool_calls", len(calls))
        place = self._transcript.ledger.last_sampled
        calling = self._environment.call_tools(calls, max_parallel=max_parallel, place=place)
        results = await self._timed(calling)
        for result in results:
            if result.incident is not None:
                self.note(result.incident.kind, result.incident.detail)
        return results

    async def interact(self) -> Reply:
        """Return the interaction's reply to the conversation, and record the turn's score.

        Raises:
            EpisodeStopped: The episode was cancelled before the interaction replied.
            EnvironmentBug: The interaction raised or exceeded its time limit.
        """
        messages, place = list(self._transcript.messages), self._transcript.ledger.last_sampled
        return await self._timed(self._environment.interact(messages, place=place))

    def stop(self, reason: StopReason) -> None:
        """Set the stop reason. No further turn is possible afterwards. Does nothing if a reason is already set."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def note(self, kind: IncidentKind, detail: str) -> None:
        """Record an incident."""
        self._transcript.note(kind, detail)

    def record_message(self, message: Message) -> None:
        """Record a message that the model does not see."""
        self._transcript.messages.append(copied(message))

    def output(
        self,
        *,
        reward_score: float | None = None,
        extra_fields: Mapping[str, Any] | None = None,
        failure: Failure | None = None,
    ) -> AgentLoopOutput:
        """Return the trajectory's record. The stop reason is `answered` if none was set.

        Args:
            reward_score: Reward that the loop computed. With None, the reward is the sum of the rewards of the tools
                and the interaction; without such rewards, the reward function computes it.
            extra_fields: Additional values, which become columns of the batch.
            failure: Failure of the trajectory, if it failed.

        Raises:
            EpisodeError: Tools or an interaction are still open. Call `await finish()` first.
        """
        if self._environment.num_open and not self._is_abandoned:
            raise EpisodeError(
                "tools or an interaction are still open; call `await episode.finish()` before output()"
            )
        if reward_score is None and self._environment.verdicts:
            reward_score = sum(self._environment.verdicts)
        segments = self._transcript.ledger.segments()
        stop_reason = StopReason.FAILED if failure else self.stop_reason or StopReason.ANSWERED
        return AgentLoopOutput(
            segments=segments,
            stop_reason=stop_reason,
            reward_score=reward_score,
            messages=self._transcript.messages,
            tool_schemas=self._transcript.tool_schemas,
            metrics=self._stopwatch.metrics,
            feedback=self._environment.feedback,
            incidents=self._transcript.incidents,
            failure=failure,
            extra_fields=extra_fields,
        )

    def mark(self) -> EpisodeMark:
        """Return the current position, for a later `branch(at=...)`."""
        return self._transcript.mark(
            num_feedback=len(self._environment.feedback), log_position=self._log.position()
        )

    def branch(self, *, at: EpisodeMark | None = None) -> Episode:
        """Return a new episode that starts from a copy of this one, for best-of-n, search or self-review.

        Enter the new episode with `async with`. It has the conversation, tokens and turn counts of this episode. It
        has its own session on the servers, and its own tool and interaction instances, created at first use. In a
        batch, the tokens that both episodes share are trained once.

        Args:
            at: Earlier position to start from, which may be in an episode that is over. None is the current position.

        Raises:
            EpisodeStopped: This episode is over, and `at` is None.
        """
        if at is None:
            self._refuse_if_over()
            at = self.mark()
        transcript = self._transcript.fork(at)
        branch = Episode(
            transcript.messages,
            template=self._template,
            server_manager=self._server_manager,
            limits=self.limits,
            tool_schemas=transcript.tool_schemas,
            log=self._log.branch(at=at.log_position),
            cancellation=self._cancelled,
        )
        self._deadlines.end(TimeLimit.TURN)
        branch._environment = self._environment.new_instance(branch._log, num_feedback=at.num_feedback)
        branch._transcript = transcript
        return branch

    # -- state for loops to read -----------------------------------------------------------------------------------

    @property
    def assistant_turns(self) -> int:
        return self._transcript.assistant_turns

    @property
    def user_turns(self) -> int:
        """Number of replies to the model."""
        return self._transcript.user_turns

    @property
    def last_turn_start(self) -> int:
        """Number of tokens before the last assistant turn."""
        return self._transcript.turn_start

    @property
    def ends_in_open_turn(self) -> bool:
        """Whether `generate` can continue the last turn: it was cut, and no reply followed."""
        return self._transcript.ends_in_open_turn

    @property
    def messages(self) -> Sequence[Message]:
        """Copy of the conversation so far."""
        return tuple(copied(self._transcript.messages))

    @property
    def context(self) -> IntArray:
        """All tokens so far, shape [num_tokens]; read-only."""
        return self._transcript.ledger.context

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments so far."""
        return self._transcript.ledger.segments()

    @property
    def feedback(self) -> tuple[Feedback, ...]:
        """Rewards, incidents and extras of all tool calls and interaction replies so far, in order."""
        return tuple(self._environment.feedback)

    @property
    def has_tools(self) -> bool:
        """Whether the prompt contains tool schemas."""
        return bool(self._transcript.tool_schemas)

    @property
    def has_interaction(self) -> bool:
        return self._environment.has_interaction

    @property
    def num_tokens_left(self) -> int:
        """Number of response tokens that `response_length` still allows."""
        return self.limits.response_length - self._transcript.ledger.num_response_tokens

    @property
    def is_last_turn(self) -> bool:
        """Whether a turn limit allows no reply after the next assistant turn."""
        transcript = self._transcript
        return self.limits.is_last_turn(
            assistant_turns=transcript.assistant_turns, user_turns=transcript.user_turns
        )

    def may_go_on(self) -> bool:
        """Return whether the limits allow a reply and another assistant turn. If not, end the episode with the
        reason."""
        transcript = self._transcript
        forbidden = self.limits.forbids_reply(
            assistant_turns=transcript.assistant_turns,
            user_turns=transcript.user_turns,
            num_tokens=transcript.ledger.num_response_tokens,
        )
        if forbidden is not None:
            self.stop(forbidden)
        return self.stop_reason is None

    # -- internals -------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        transcript = self._transcript
        if len(transcript.ledger):  # a branch has its prompt already
            return
        if self._environment.opens_conversation:
            transcript.messages = await self._timed(self._environment.opened(transcript.messages))
        encoded = await self._log.tokens(transcript.messages, encode=transcript.encoded_prompt)
        if not transcript.add_prompt(
            encoded, max_tokens=self.limits.prompt_length, truncate=self.limits.truncate_prompt
        ):
            self.stop(StopReason.PROMPT_LENGTH)

    def _refuse_if_over(self) -> None:
        self._stopwatch.now()  # raises if the episode is not open
        if self.stop_reason is not None:
            raise EpisodeStopped(self.stop_reason)

    def _stopped(self, reason: StopReason) -> EpisodeStopped:
        self.stop(reason)
        return EpisodeStopped(reason)

    async def _timed(self, call: Awaitable[ResultT]) -> ResultT:
        """Await a call of tools or an interaction and count its seconds. An aborted call ends the episode."""
        now = self._stopwatch.now
        began_at = now()
        try:
            return await call
        except CallAborted:
            raise self._stopped(StopReason.CANCELLED) from None
        finally:
            self._stopwatch.count("tool_calls", now() - began_at)

    def _record_turn(
        self, sampled: TokenOutput, *, params: SamplingParams, prefix: TokenIds, continues_turn: bool
    ) -> Completion:
        if sampled.num_preempted:
            self._stopwatch.count("num_preempted", sampled.num_preempted)
        return self._transcript.add_turn(sampled, params=params, prefix=prefix, continues_turn=continues_turn)

    async def _close(self, reason: StopReason) -> None:
        self.stop(reason)
        if self._is_closed:
            return
        self._is_closed = True
        self._transcript.incidents += await self._environment.close()
