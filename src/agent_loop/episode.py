"""The live state of one trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from agent_loop.chat.multimodal import Encoded
from agent_loop.chat.template import ChatTemplate
from agent_loop.concurrency import run_abortable
from agent_loop.deadlines import Deadlines, TimeLimit
from agent_loop.errors import AgentLoopError, EpisodeError
from agent_loop.interactions.session import InteractionReply, InteractionSession
from agent_loop.ledger import TokenLedger
from agent_loop.limits import EpisodeLimits
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.surroundings import Surroundings
from agent_loop.tools.session import ToolResult, ToolSession
from agent_loop.trajectory import AgentLoopMetrics, AgentLoopOutput, Failure, Incident, IncidentKind
from agent_loop.turn_log import TurnLog, Unlogged
from agent_loop.types import (
    IntArray,
    MalformedCall,
    Message,
    Origin,
    ParsedCompletion,
    SamplingParams,
    StopReason,
    TokenChunk,
    TokenOutput,
    ToolCall,
)
from agent_loop.waits import WaitKind, waiting_for

ABORT_GRACE_S = 5.0
"""How long a server may take to hand over the tokens of an aborted request."""


class EpisodeStopped(AgentLoopError):
    """Raised by an episode that is over, to leave the loop's body; the trajectory's record is complete."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"the episode is over: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Completion:
    """One assistant turn, as it was sampled and as it reads."""

    sampled: TokenOutput
    parsed: ParsedCompletion
    is_cut: bool
    """It ended by a limit, not by the model's own stop token."""

    @property
    def token_ids(self) -> Sequence[int]:
        return self.sampled.token_ids

    @property
    def content(self) -> str:
        return self.parsed.content

    @property
    def calls(self) -> tuple[ToolCall | MalformedCall, ...]:
        return self.parsed.calls


@dataclass(frozen=True, slots=True)
class EpisodeMark:
    """A place in an episode, between its verbs, from which it may branch later."""

    num_tokens: int
    num_messages: int
    assistant_turns: int
    user_turns: int
    last_calls: Sequence[ToolCall]
    num_feedback: int


class Episode:
    """One trajectory while it runs: the only writer of its tokens, the one place where its limits are kept.

    Single use, with `async with`. Entering renders the prompt; leaving closes the tools and the interaction, whatever
    happened. Verbs: `generate`, `observe`, `call_tools`, `interact`, `finish`, `output`. A verb on an episode that is
    over raises `EpisodeStopped`, which the worker turns into the trajectory's record; a loop need not catch it.
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
        interaction: InteractionSession | None = None,
        request_id: str | None = None,
        log: TurnLog | None = None,
    ) -> None:
        self.request_id = request_id or uuid4().hex
        self.limits = limits
        self.stop_reason: StopReason | None = None
        self.assistant_turns = 0
        self.user_turns = 0
        self._messages: list[Message] = list(messages)
        self._template = template
        self._server_manager = server_manager
        self._log = log or Unlogged()
        self._surroundings = Surroundings(tools=tools, interaction=interaction, log=self._log)
        self._tool_schemas = tool_schemas
        self._ledger = TokenLedger()
        self._last_calls: Sequence[ToolCall] = ()
        self._incidents: list[Incident] = []
        self._metrics = AgentLoopMetrics()
        self._clock: _Clock | None = None
        self._deadlines = Deadlines()
        self._is_closed = False

    # -- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._clock is not None:
            raise EpisodeError("an episode is used once; make a new one")
        self._clock = _Clock(asyncio.get_running_loop())
        await self._deadlines.__aenter__()
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
            self._note_deadline()
            await self.finish(StopReason.DEADLINE)
            raise EpisodeStopped(StopReason.DEADLINE) from None
        if error is None or isinstance(error, EpisodeStopped):
            await self.finish()
        elif isinstance(error, asyncio.CancelledError):
            await self._close(StopReason.CANCELLED)
        else:
            await self._close(StopReason.FAILED)

    async def finish(self, reason: StopReason = StopReason.ANSWERED) -> None:
        """Ends the episode: tools and interaction give their verdicts and are closed.

        A reason that already stands remains. Finishing twice is the same as once.

        Raises:
            ToolBug: A tool's `calc_reward` raised or took too long.
            InteractionBug: The interaction's `calculate_score` did.
        """
        if self._is_closed:
            return
        self.stop(reason)
        self._deadlines.end(TimeLimit.TURN)
        try:
            await self._surroundings.judge()
        finally:
            await self._close(reason)

    # -- verbs -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        sampling_params: Mapping[str, Any] | SamplingParams,
        *,
        stop_token_ids: Sequence[int] = (),
        hear: Callable[[TokenChunk], bool] | None = None,
    ) -> Completion:
        """One assistant turn.

        A turn that is cut by `response_length` or aborted ends the episode. One that is cut by `max_turn_tokens` does
        not: the next `observe` closes it.

        Args:
            sampling_params: See `SamplingParams`; `max_tokens` is lowered to what the limits leave.
            stop_token_ids: More stop tokens, for this turn alone.
            hear: Is given each token while the model speaks, and tells whether it may go on; if not, the turn ends
                there. Not asked about a turn that is on record.

        Raises:
            EpisodeStopped: The episode is over, or a limit allows no further turn.
            ServerError: The server failed.
        """
        self._refuse_if_over()
        used = self._ledger.num_response_tokens
        forbidden = self.limits.forbids_turn(assistant_turns=self.assistant_turns, num_tokens=used)
        if forbidden is not None:
            raise self._stopped(forbidden)
        params = self.limits.applied(
            SamplingParams.parse(sampling_params), num_tokens=used, stop_token_ids=stop_token_ids
        )
        started = self._now
        self._deadlines.begin(TimeLimit.TURN, seconds=self.limits.turn_timeout_s)
        self._deadlines.begin(TimeLimit.GENERATE, seconds=self.limits.generate_timeout_s)
        try:
            sampled = await self._log.completion(
                params, num_context=len(self._ledger), sample=partial(self._sample, params, hear)
            )
        finally:
            self._deadlines.end(TimeLimit.GENERATE)
            self._add_metrics(generate_sequences=self._now - started)
        completion = self._record_turn(sampled)
        if sampled.stop_reason == "aborted":
            self.stop(StopReason.CANCELLED)
        elif self.num_tokens_left <= 0 and (completion.is_cut or completion.calls):
            self.stop(StopReason.RESPONSE_LENGTH)
        return completion

    async def observe(self, messages: Sequence[Message]) -> bool:
        """Adds what tools, a user or an environment said; the model speaks next.

        Returns:
            Whether it was added. It is not if it does not fit into `response_length`; the episode is over then, as it
            is if it fits exactly.

        Raises:
            EpisodeStopped: The episode is over, or a limit allows no further turn.
            ChatTemplateError: The template does not accept the messages; the episode is as it was.
        """
        self._refuse_if_over()
        if not self.may_go_on():
            raise EpisodeStopped(self.stop_reason or StopReason.FAILED)
        ids, attachments = await self._log.tokens(messages, encode=partial(self._encode_reply, messages))
        self._messages += messages
        left = self.num_tokens_left
        if len(ids) >= left:
            self.stop(StopReason.RESPONSE_LENGTH)
        if len(ids) > left:
            self.note(
                IncidentKind.DROPPED_OBSERVATION, f"the reply has {len(ids)} tokens where {left} are left"
            )
            return False
        is_tool_reply = any(message["role"] == "tool" for message in messages)
        origin = Origin.TOOL if is_tool_reply else Origin.INTERACTION
        self._ledger.append(ids, origin=origin, attachments=attachments)
        self._deadlines.end(TimeLimit.TURN)
        self.user_turns += 1
        return True

    async def call_tools(self, calls: Sequence[ToolCall], *, max_parallel: int = 1) -> list[ToolResult]:
        """Runs calls on the trajectory's own tool instances and records what they earned.

        Args:
            max_parallel: So many run at once; the rest queue behind them.

        Returns:
            One result per call, in order.

        Raises:
            ToolBug: A tool raised something else than `ToolError`; the calls beside it are cancelled.
        """
        started = self._now
        try:
            results = await self._surroundings.call_tools(
                calls, max_parallel=max_parallel, place=self._ledger.last_sampled
            )
        finally:
            self._add_metrics(tool_calls=self._now - started, num_tool_calls=len(calls))
        for result in results:
            if result.incident is not None:
                self.note(result.incident.kind, result.incident.detail)
        return results

    async def interact(self) -> InteractionReply:
        """Asks the interaction for its reply to the conversation and records the turn's score.

        Raises:
            InteractionBug: It raised or took too long.
        """
        started = self._now
        try:
            return await self._surroundings.interact(list(self._messages), place=self._ledger.last_sampled)
        finally:
            self._add_metrics(tool_calls=self._now - started)

    def stop(self, reason: StopReason) -> None:
        """Says why the episode ends; no further turn is possible. The first reason stands."""
        if self.stop_reason is None:
            self.stop_reason = reason

    def note(self, kind: IncidentKind, detail: str) -> None:
        """Records a named loss."""
        self._incidents.append(Incident(kind, detail, self.assistant_turns))

    def record_message(self, message: Message) -> None:
        """Keeps a message that the model does not see, for the conversation's record."""
        self._messages.append(message)

    def output(
        self,
        *,
        reward_score: float | None = None,
        extra_fields: Mapping[str, Any] | None = None,
        failure: Failure | None = None,
    ) -> AgentLoopOutput:
        """The trajectory's record. An episode that nobody ended has `answered`.

        Args:
            reward_score: The loop's own reward; None leaves it to the tools and the interaction, and if they have none
                to the reward function.
            extra_fields: Whatever else to hand on; becomes columns of the batch.
            failure: What made it fail.

        Raises:
            EpisodeError: Tools or an interaction are open; `await finish()` first.
        """
        if self._surroundings.num_open:
            raise EpisodeError(
                "tools or an interaction are still open; await episode.finish() before output()"
            )
        if reward_score is None and self._surroundings.verdicts:
            reward_score = sum(self._surroundings.verdicts)
        segments = self._ledger.segments()
        self._log.holds(segments)
        stop_reason = StopReason.FAILED if failure else self.stop_reason or StopReason.ANSWERED
        return AgentLoopOutput(
            segments=segments,
            stop_reason=stop_reason,
            reward_score=reward_score,
            messages=self._messages,
            tool_schemas=self._tool_schemas,
            metrics=replace(self._metrics, total=self._now),
            feedback=self._surroundings.feedback,
            incidents=self._incidents,
            failure=failure,
            extra_fields=extra_fields,
        )

    def mark(self) -> EpisodeMark:
        """Where the episode stands, for `branch(at=...)` once it has gone on."""
        return EpisodeMark(
            num_tokens=len(self._ledger),
            num_messages=len(self._messages),
            assistant_turns=self.assistant_turns,
            user_turns=self.user_turns,
            last_calls=self._last_calls,
            num_feedback=len(self._surroundings.feedback),
        )

    def branch(self, *, at: EpisodeMark | None = None) -> Episode:
        """An episode that goes on from here in another way, for `async with`: best-of, search, a second opinion.

        It has this one's conversation, tokens and turn counts, a session of its own on the servers, and tool and
        interaction instances of its own, made at first use. In a batch, what the two have in common is trained once.

        Args:
            at: Where this episode stood, which may be over meanwhile; None is where it stands. A journal does not keep
                the turns of a branch from a place that was left.

        Raises:
            EpisodeStopped: This episode is over.
        """
        here = self.mark()
        if at is None:
            self._refuse_if_over()
            at = here
        branch = Episode(
            self._messages[: at.num_messages],
            template=self._template,
            server_manager=self._server_manager,
            limits=self.limits,
            tool_schemas=self._tool_schemas,
            log=self._log.branch() if at == here else Unlogged(),
        )
        self._deadlines.end(TimeLimit.TURN)
        branch._surroundings = self._surroundings.fresh(branch._log, num_feedback=at.num_feedback)
        branch._ledger = self._ledger.fork(at.num_tokens)
        branch._last_calls = at.last_calls
        branch.assistant_turns, branch.user_turns = at.assistant_turns, at.user_turns
        return branch

    # -- what loops may ask ----------------------------------------------------------------------------------------

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return tuple(self._messages)

    @property
    def context(self) -> IntArray:
        """All tokens so far, shape [num_tokens]; read-only."""
        return self._ledger.context

    @property
    def has_tools(self) -> bool:
        """Whether the model was shown any."""
        return bool(self._tool_schemas)

    @property
    def has_interaction(self) -> bool:
        return self._surroundings.has_interaction

    @property
    def num_tokens_left(self) -> int:
        """What `response_length` leaves."""
        return self.limits.response_length - self._ledger.num_response_tokens

    @property
    def is_last_turn(self) -> bool:
        """Whether nothing that the next assistant turn asks for could be answered: a turn limit stands behind it."""
        return self.limits.is_last_turn(assistant_turns=self.assistant_turns, user_turns=self.user_turns)

    def may_go_on(self) -> bool:
        """Whether a reply and another assistant turn are allowed; if not, the episode is over with the reason."""
        forbidden = self.limits.forbids_reply(
            assistant_turns=self.assistant_turns,
            user_turns=self.user_turns,
            num_tokens=self._ledger.num_response_tokens,
        )
        if forbidden is not None:
            self.stop(forbidden)
        return self.stop_reason is None

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        if len(self._ledger):  # a branch has its prompt already
            return
        self._messages = await self._surroundings.opened(self._messages)
        encoded = await self._log.tokens(self._messages, encode=self._encode_prompt)
        ids = encoded.token_ids
        limit, side = self.limits.prompt_length, self.limits.truncate_prompt
        if len(ids) > limit:
            detail = f"the prompt has {len(ids)} tokens, over prompt_length {limit}"
            if side == "no":
                self.note(IncidentKind.TRUNCATED_PROMPT, f"{detail}; no token of it was used")
                self.stop(StopReason.PROMPT_LENGTH)
                return
            self.note(IncidentKind.TRUNCATED_PROMPT, f"{detail}; cut on the {side}")
            encoded = encoded.last(limit) if side == "left" else encoded.first(limit)
        self._ledger.append(encoded.token_ids, origin=Origin.PROMPT, attachments=encoded.attachments)

    async def _encode_prompt(self) -> Encoded:
        with waiting_for(WaitKind.ENCODING):
            read = await self._template.read(self._messages)
        return self._template.open_encoded(self._messages, tools=self._tool_schemas, read=read)

    async def _encode_reply(self, messages: Sequence[Message]) -> Encoded:
        with waiting_for(WaitKind.ENCODING):
            read = await self._template.read(messages)
        return self._template.bridge_encoded(
            messages, last_token_id=self._ledger.last_token_id, calls=self._last_calls, read=read
        )

    async def _sample(self, params: SamplingParams, hear: Callable[[TokenChunk], bool] | None) -> TokenOutput:
        asked: dict[str, Any] = {
            "prompt_ids": self._ledger.context,
            "sampling_params": params,
            "attachments": self._ledger.attachments,
        }
        generate = self._server_manager.generate if hear is None else partial(self._heard, hear)
        return await run_abortable(
            generate(self.request_id, **asked),
            abort=lambda: self._server_manager.abort(self.request_id),
            keep_partial=self._record_turn,
            grace_s=ABORT_GRACE_S,
        )

    async def _heard(self, hear: Callable[[TokenChunk], bool], request_id: str, **asked: Any) -> TokenOutput:
        """Samples token by token, as long as it may go on."""
        chunks: list[TokenChunk] = []
        async with aclosing(self._server_manager.stream(request_id, **asked)) as stream:
            async for chunk in stream:
                for piece in chunk.single_tokens():
                    if hear(piece):
                        chunks.append(piece)
                    else:
                        return TokenOutput.from_chunks([*chunks, replace(piece, stop_reason="stop")])
        return TokenOutput.from_chunks(chunks)

    def _note_deadline(self) -> None:
        """Names the time limit that passed, unless the stop reason does."""
        passed = self._deadlines.passed
        kinds = {
            TimeLimit.GENERATE: (IncidentKind.GENERATE_TIMEOUT, self.limits.generate_timeout_s),
            TimeLimit.TURN: (IncidentKind.TURN_TIMEOUT, self.limits.turn_timeout_s),
        }
        if passed in kinds:
            kind, seconds = kinds[passed]
            what = "its completion" if passed is TimeLimit.GENERATE else "the completion and the reply to it"
            self.note(kind, f"the turn was cut: {what} took longer than {seconds:g} s ({passed})")

    def _refuse_if_over(self) -> None:
        if self._clock is None:
            raise EpisodeError("the episode is not open; use it with `async with`")
        if self.stop_reason is not None:
            raise EpisodeStopped(self.stop_reason)

    def _stopped(self, reason: StopReason) -> EpisodeStopped:
        self.stop(reason)
        return EpisodeStopped(reason)

    def _record_turn(self, sampled: TokenOutput) -> Completion:
        context = self._ledger.context
        self._ledger.append_completion(sampled)
        self._add_metrics(num_preempted=sampled.num_preempted)
        parsed = self._template.parse(sampled.token_ids, tools=self._tool_schemas, context=context)
        is_cut = sampled.stop_reason != "stop"
        self.assistant_turns += 1
        self._messages.append(parsed.as_message())
        self._last_calls = parsed.tool_calls
        if is_cut:
            self.note(IncidentKind.CUT_TURN, f"{sampled.stop_reason} after {len(sampled.token_ids)} tokens")
        return Completion(sampled, parsed, is_cut)

    async def _close(self, reason: StopReason) -> None:
        self.stop(reason)
        if self._is_closed:
            return
        self._is_closed = True
        self._incidents += await self._surroundings.close()

    @property
    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock.seconds

    def _add_metrics(self, **amounts: Any) -> None:
        self._metrics = replace(
            self._metrics, **{name: getattr(self._metrics, name) + amount for name, amount in amounts.items()}
        )


class _Clock:
    """Seconds since the episode was opened, in the event loop's time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._started = loop.time()

    @property
    def seconds(self) -> float:
        return self._loop.time() - self._started
