"""The conversations of one agent program with the model, recorded to the token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from agent_loop.episode import EpisodeStopped
from agent_loop.errors import AgentLoopError, JournalError, RequestError, ServerError
from agent_loop.loops.base import LoopContext
from agent_loop.recording.row_log import ReplayMismatch
from agent_loop.runtime.concurrency import merged, run_shielded
from agent_loop.serve.branches import Branches, GatewayBug, LimitReached, limit_error
from agent_loop.serve.chat import count_prompt_tokens
from agent_loop.serve.chat_replies import ParsedChunk
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.conversation_tree import ConversationTree, TurnNode
from agent_loop.serve.responses_requests import CallRecord
from agent_loop.serve.shared_completion import (
    CompletionIndex,
    RetryInfo,
    SharedCompletion,
    fingerprint_of,
)
from agent_loop.serve.turns import (
    TurnGenerator,
    TurnPlan,
    WrittenConversation,
    plan_turn,
)
from agent_loop.serve.wishes import NO_WISHES, Wishes
from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, IncidentKind
from agent_loop.types import StopReason

CLOSE_TIMEOUT_S = 15.0
MAX_BRANCHES = 64
AS_USER = Incident(
    IncidentKind.SYSTEM_MESSAGE_AS_USER,
    "the chat template does not render system messages at every place; later ones became text of the user",
)
REWRITTEN = Incident(
    IncidentKind.REWRITTEN_CALL,
    "the client changed the arguments of calls in its record of the conversation; the model sees its own",
)
ABORTED = "the completion was aborted because its session ended or its client disconnected"


class Session:
    """Answers the requests of one program, and records its conversations as a tree.

    A request that continues a completion is bridged: earlier tokens are neither rendered nor encoded again. A request
    that continues an earlier turn starts a branch there. Any other request starts a new conversation. A session is
    used once, with `async with`, which aborts in-flight requests on exit.

    Args:
        context: Servers, chat template and limits. The limits apply to each conversation, the deadline to the program.
        sampling_params: Defaults for parameters that a request does not set.
        max_branches: Maximum number of conversations; further ones are refused.
        wishes: Parameters that requests may have although they cannot be honoured.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        max_branches: int = MAX_BRANCHES,
        wishes: Wishes = NO_WISHES,
    ) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self.fault: Exception | None = None
        """Error that must end the whole run, beyond the response to the program."""
        self.was_refused = False
        """Whether the last request was refused because of a limit."""
        self.template = context.template
        self.wishes = wishes
        self.calls = CallRecord()
        """Calls that the model made, for the Responses API."""
        self._pool = context.server_manager.pool
        self._branches = Branches(context, max_branches=max_branches)
        self._tree = ConversationTree()
        self._generator = TurnGenerator(
            context, branches=self._branches, tree=self._tree, sampling_params=sampling_params or {}
        )
        self._completions = CompletionIndex()
        self._running: set[asyncio.Task[None]] = set()
        self.deadline = asyncio.timeout(context.limits.deadline_s)
        """Time limit of the program; run the program inside `async with`."""
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reason = StopReason.ANSWERED if error is None else StopReason.CANCELLED
        try:
            await self.close(reason)
        finally:
            await self._tasks.__aexit__(kind, error, traceback)

    async def close(self, reason: StopReason) -> None:
        """Abort in-flight completions and end all conversations. The tokens sampled so far are kept."""

        async def end() -> None:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            await self._branches.close(reason)

        await run_shielded(end, timeout_s=CLOSE_TIMEOUT_S)

    def submit(
        self,
        request: ChatCompletionRequest,
        *,
        retry: RetryInfo,
        incidents: Sequence[Incident] = (),
        trusts_call_ids: bool = False,
    ) -> AsyncGenerator[ParsedChunk]:
        """Start the completions of a request and yield their chunks. A retry gets those of the original request.

        Args:
            request: The request.
            retry: Whether the request is a retry.
            incidents: What was lost in reading and translating the request. Each is recorded once for each branch.
            trusts_call_ids: Whether a call with the id of a sampled call is that call, even if the client has changed
                its arguments.
        """
        if self.deadline.expired():
            raise limit_error(StopReason.DEADLINE)
        granted, dropped = self._granted(request)
        written = WrittenConversation.of(granted, self.template)
        fingerprint = fingerprint_of(request, written.keys)
        known = self._completions.find(fingerprint, retry)
        if known is not None:
            return merged(completion.follow() for completion in known)
        plan = plan_turn(
            granted,
            written,
            self._tree,
            json_schema=request.json_schema,
            trusts_call_ids=trusts_call_ids,
        )
        turns = self._claim_turns(plan, num_choices=request.num_choices)
        lost = [*incidents, *dropped]
        lost += [AS_USER] if written.has_moved_system else []
        lost += [REWRITTEN] if plan.position.has_rewritten_calls else []
        for turn in turns:
            turn.branch.note_once(lost)
        completions = [self._start(plan, turn, choice=number) for number, turn in enumerate(turns)]
        self._completions.add(fingerprint, retry, completions)
        return merged(completion.follow() for completion in completions)

    async def count_tokens(self, request: ChatCompletionRequest) -> int:
        """Return the number of tokens of the prompt that a new conversation with a request's messages would have."""
        granted, _ = self._granted(request)
        return await count_prompt_tokens(granted, template=self.template)

    def note_failure(self, error: AgentLoopError) -> None:
        """Record a failed request as an incident, unless its error is recorded already."""
        self._branches.note_failure(error)

    def outputs(
        self,
        *,
        reward: float | None = None,
        extra_fields: Mapping[str, Any] | None = None,
        failure: Failure | None = None,
    ) -> list[AgentLoopOutput]:
        """Return one output for each branch; an empty list if the program sent no request.

        Branches share the segments of their common beginning, which are trained on once. The first output carries a
        failure of the program, so that it counts once; the other outputs are then cancelled.
        """
        outputs = [
            branch.episode.output(reward_score=reward, extra_fields=extra_fields)
            for branch in self._branches.recorded
        ]
        if failure is None or not outputs:
            return outputs
        first, *others = outputs
        return [first.failed(failure), *(replace(o, stop_reason=StopReason.CANCELLED) for o in others)]

    def _granted(self, request: ChatCompletionRequest) -> tuple[ChatCompletionRequest, Sequence[Incident]]:
        return self.wishes.granted(request, template=self.template, pool=self._pool)

    # -- position of a request -------------------------------------------------------------------------------------

    def _claim_turns(self, plan: TurnPlan, *, num_choices: int) -> list[TurnNode]:
        """Return a turn for each choice, whose branch is at the request's position and reserved for the choice.

        This function does not await, so that concurrent requests cannot claim the same branch.
        """
        turns: list[TurnNode] = []
        try:
            turns.extend(self._claim_turn(plan) for _ in range(num_choices))
        except LimitReached as error:
            for turn in turns:
                self._branches.release(turn.branch)
            self.was_refused = True
            self._branches.note_failure(error)
            raise
        return turns

    def _claim_turn(self, plan: TurnPlan) -> TurnNode:
        for turn in self._tree.turns_at(plan.position):
            if turn.branch.is_free_at(turn.before):  # the turn's completion failed before its first token
                turn.branch.is_busy = True
                return turn
        turn = self._new_turn(plan)
        self._tree.add(turn)
        return turn

    def _new_turn(self, plan: TurnPlan) -> TurnNode:
        position, parent, cut = plan.position, plan.position.parent, plan.continued
        if cut is not None and cut.after is not None:
            if not cut.branch.is_free_at(cut.after):
                return TurnNode(self._branches.fork(cut.branch, at=cut.after), position, before=cut.after)
            cut.branch.is_busy = True
            return TurnNode(cut.branch, position, before=cut.after)
        if parent is not None and parent.branch.is_free_at(parent.after):
            parent.branch.is_busy = True
            return TurnNode(parent.branch, position)
        for turn in self._tree.turns_at(position):
            if turn.before is not None:
                branch = self._branches.fork(turn.branch, at=turn.before)
                return TurnNode(branch, position, before=turn.before)
        if parent is not None and parent.after is not None:
            return TurnNode(self._branches.fork(parent.branch, at=parent.after), position)
        branch = self._branches.start(plan.messages, template=plan.template, tools=plan.request.tools_in_use)
        return TurnNode(branch, position)

    # -- completion of a request -----------------------------------------------------------------------------------

    def _start(self, plan: TurnPlan, turn: TurnNode, *, choice: int) -> SharedCompletion:
        """Start a task that generates one of the completions of a request."""
        shared = SharedCompletion()
        task = self._tasks.create_task(self._generate(plan, turn, shared, choice=choice))
        self._running.add(task)
        task.add_done_callback(partial(self._on_task_done, shared))
        shared.task = task
        return shared

    async def _generate(
        self, plan: TurnPlan, turn: TurnNode, shared: SharedCompletion, *, choice: int
    ) -> None:
        """Generate one completion of a request. Every exception becomes the error of the completion."""
        try:
            await self._generator.generate(plan, turn=turn, shared=shared, choice=choice)
        except EpisodeStopped as stopped:
            self._fail(turn, shared, limit_error(stopped.reason))
        except JournalError as error:
            self.fault = error
            self._fail(turn, shared, error)
        except ReplayMismatch as error:  # a retry would fail in the same way
            self._fail(turn, shared, RequestError(str(error), code="replay_mismatch"))
        except AgentLoopError as error:
            self._fail(turn, shared, error)
        except asyncio.CancelledError:
            turn.branch.episode.stop(self._cancellation_reason)
            shared.finish(ServerError(ABORTED))
            raise
        except Exception as error:  # noqa: BLE001  (the loop raises `fault` with its traceback)
            self.fault = error
            self._fail(turn, shared, GatewayBug(f"{type(error).__name__}: {error}"))
        else:
            self.was_refused = False
            shared.finish()
        finally:
            turn.branch.is_busy = False

    def _fail(self, turn: TurnNode, shared: SharedCompletion, error: AgentLoopError) -> None:
        self.was_refused = isinstance(error, LimitReached)
        self._branches.note_failure(error, branch=turn.branch)
        shared.finish(error)

    def _on_task_done(self, shared: SharedCompletion, task: asyncio.Task[None]) -> None:
        """Finish the completion. Needed if the task was cancelled before it started."""
        self._running.discard(task)
        shared.finish(ServerError(ABORTED))

    @property
    def _cancellation_reason(self) -> StopReason:
        return StopReason.DEADLINE if self.deadline.expired() else StopReason.CANCELLED
