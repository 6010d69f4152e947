"""The conversations of one agent program with the model, recorded to the token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from agent_loop.episode import Episode, EpisodeMark, EpisodeStopped
from agent_loop.errors import AgentLoopError, ChatTemplateError, JournalError, RequestError, ServerError
from agent_loop.loops.base import LoopContext
from agent_loop.recording.row_log import ReplayMismatch
from agent_loop.runtime.concurrency import merged, run_shielded
from agent_loop.serve.chat import count_prompt_tokens, turn_reader
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.completions import ReplyChunk
from agent_loop.serve.conversation_tree import Branch, ConversationTree, TurnNode, message_keys
from agent_loop.serve.responses_requests import CallRecord
from agent_loop.serve.shared_completion import (
    CompletionIndex,
    RetryInfo,
    SharedCompletion,
    fingerprint_of,
)
from agent_loop.serve.turns import (
    TurnPlan,
    beginning_of,
    plan_turn,
    sampling_params_of,
    sent_message,
    unmet_demands,
    with_model_call_ids,
)
from agent_loop.serve.wishes import NO_WISHES, Wishes
from agent_loop.trajectory import AgentLoopOutput, Failure, Incident, IncidentKind
from agent_loop.types import StopReason, TokenChunk

CLOSE_TIMEOUT_S = 15.0
MAX_BRANCHES = 64
TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a conversation that cannot get longer."""
AS_USER = Incident(
    IncidentKind.SYSTEM_MESSAGE_AS_USER,
    "the chat template does not render system messages at every place; later ones became text of the user",
)
REWRITTEN = Incident(
    IncidentKind.REWRITTEN_CALL,
    "the client changed the arguments of calls in its record of the conversation; the model sees its own",
)
ABORTED = "the completion was aborted because its session ended or its client disconnected"


class LimitReached(RequestError):
    """A limit of the trajectory allows no further turn. Clients do not retry such a request."""


class GatewayBug(AgentLoopError):
    """An unexpected exception in the gateway or in a layer below it."""


class Session:
    """Answers the requests of one program, and records its conversations as a tree.

    A request that continues a completion is bridged: earlier tokens are neither rendered nor encoded again. A request
    that continues an earlier turn starts a branch there. Any other request starts a new conversation. A session is
    used once, with `async with`, which aborts in-flight requests on exit.

    Each branch is an episode. The episodes have no time limits of their own, because a time limit is bound to the task
    that opens an episode and each request has its own task. The session limits the time of the trajectory and of each
    completion.

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
        self._context = context
        self._sampling_params = dict(sampling_params or {})
        self._max_branches = max_branches
        self._branches: list[Branch] = []
        self._num_started = 0
        self._open_episodes = AsyncExitStack()
        self._noted_errors: list[Exception] = []
        self._tree = ConversationTree()
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
            for branch in self._branches:
                branch.episode.stop(reason)
            await self._open_episodes.aclose()

        await run_shielded(end, timeout_s=CLOSE_TIMEOUT_S)

    def submit(
        self,
        request: ChatCompletionRequest,
        *,
        retry: RetryInfo,
        incidents: Sequence[Incident] = (),
        trusts_call_ids: bool = False,
    ) -> AsyncGenerator[ReplyChunk]:
        """Start the completions of a request and yield their chunks. A retry gets those of the original request.

        Args:
            request: The request.
            retry: Whether the request is a retry.
            incidents: What was lost in reading and translating the request. Each is recorded once for each branch.
            trusts_call_ids: Whether a call with the id of a sampled call is that call, even if the client has changed
                its arguments.
        """
        if self.deadline.expired():
            raise _limit_error(StopReason.DEADLINE)
        granted, dropped = self._granted(request)
        plan = plan_turn(
            granted,
            template=self.template,
            tree=self._tree,
            json_schema=request.json_schema,
            trusts_call_ids=trusts_call_ids,
        )
        fingerprint = fingerprint_of(granted, plan.keys)
        completions = self._completions.find(fingerprint, retry)
        if completions is None:
            turns = self._claim_turns(plan, num_choices=request.num_choices)
            lost = [*incidents, *dropped]
            lost += [AS_USER] if plan.has_moved_system else []
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

    def note_failure(self, error: Exception, *, branch: Branch | None = None) -> None:
        """Record a failed request as an incident. Each error is recorded once.

        The incident belongs to `branch` if the model sampled tokens in it, else to the first recorded branch.
        """
        if branch is None or not branch.has_sampled_tokens:
            branch = next(iter(self._recorded), branch)
        if branch is not None and error not in self._noted_errors:
            self._noted_errors.append(error)
            branch.episode.note(IncidentKind.FAILED_REQUEST, str(error))

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
            branch.episode.output(reward_score=reward, extra_fields=extra_fields) for branch in self._recorded
        ]
        if failure is None or not outputs:
            return outputs
        first, *others = outputs
        return [first.failed(failure), *(replace(o, stop_reason=StopReason.CANCELLED) for o in others)]

    @property
    def _recorded(self) -> Sequence[Branch]:
        """Branches with sampled tokens; if there are none, the first open branch."""
        sampled = [branch for branch in self._branches if branch.has_sampled_tokens]
        return sampled or [branch for branch in self._branches if branch.is_open][:1]

    def _granted(self, request: ChatCompletionRequest) -> tuple[ChatCompletionRequest, Sequence[Incident]]:
        pool = self._context.server_manager.pool
        return self.wishes.granted(request, template=self.template, pool=pool)

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
                turn.branch.is_busy = False
                if not turn.branch.is_open:
                    self._branches.remove(turn.branch)
            self.was_refused = True
            self.note_failure(error)
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
            return TurnNode(self._branch_at(cut.branch, cut.after), position, before=cut.after)
        if parent is not None and parent.branch.is_free_at(parent.after):
            parent.branch.is_busy = True
            return TurnNode(parent.branch, position)
        for turn in self._tree.turns_at(position):
            if turn.before is not None:
                return TurnNode(self._branch_at(turn.branch, turn.before), position, before=turn.before)
        if parent is not None and parent.after is not None:
            return TurnNode(self._branch_at(parent.branch, parent.after), position)
        return TurnNode(self._start_branch(plan), position)

    def _start_branch(self, plan: TurnPlan) -> Branch:
        """Return a new branch that starts with the messages of a plan."""
        context = self._context
        return self._added(
            lambda: Episode(
                plan.messages,
                template=plan.template,
                server_manager=context.server_manager,
                limits=replace(context.limits, deadline_s=None, turn_timeout_s=None, generate_timeout_s=None),
                tool_schemas=plan.request.tools_in_use,
                log=context.new_log(),
            )
        )

    def _branch_at(self, branch: Branch, mark: EpisodeMark) -> Branch:
        """Return a branch that continues from a mark: the branch of the mark if it is free there, else a new one."""
        if branch.is_free_at(mark):
            branch.is_busy = True
            return branch
        return self._added(lambda: branch.episode.branch(at=mark))

    def _added(self, new_episode: Callable[[], Episode]) -> Branch:
        if len(self._branches) >= self._max_branches:
            raise LimitReached(
                f"this program has {self._max_branches} conversations already; raise max_branches if it needs more",
                code="too_many_branches",
            )
        branch = Branch(new_episode(), number=self._num_started)
        self._num_started += 1
        self._branches.append(branch)
        return branch

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
            await self._add_new_messages(turn, plan)
            await self._sample(turn, plan, shared, choice=choice)
            self._complete(turn, plan, shared)
        except EpisodeStopped as stopped:
            self._fail(turn, shared, _limit_error(stopped.reason))
        except JournalError as error:
            self.fault = error
            self._fail(turn, shared, error)
        except ReplayMismatch as error:  # a retry would fail in the same way
            self._fail(turn, shared, RequestError(str(error), code="replay_mismatch"))
        except AgentLoopError as error:
            self._fail(turn, shared, error)
        except asyncio.CancelledError:
            is_late = self.deadline.expired()
            turn.branch.episode.stop(StopReason.DEADLINE if is_late else StopReason.CANCELLED)
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
        self.note_failure(error, branch=turn.branch)
        shared.finish(error)

    def _on_task_done(self, shared: SharedCompletion, task: asyncio.Task[None]) -> None:
        """Finish the completion. Needed if the task was cancelled before it started."""
        self._running.discard(task)
        shared.finish(ServerError(ABORTED))

    async def _add_new_messages(self, turn: TurnNode, plan: TurnPlan) -> None:
        """Add a request's new messages to the episode of its branch."""
        await self._open(turn.branch)
        if turn.before is None and turn.position.parent is not None:
            try:
                new_messages = with_model_call_ids(turn.position)
                if not await turn.branch.episode.observe(new_messages):
                    raise EpisodeStopped(StopReason.RESPONSE_LENGTH)
            except ChatTemplateError:
                # The template cannot render the new messages after this turn, but it may render the conversation.
                branch = self._start_branch(plan)
                branch.note_once(turn.branch.noted)
                turn.branch.is_busy, turn.branch = False, branch
                await self._open(branch)
        turn.before = turn.branch.episode.mark()

    async def _open(self, branch: Branch) -> None:
        """Render the prompt of a branch. Do nothing if the branch is open already."""
        if branch.is_open:
            return
        try:
            await self._open_episodes.enter_async_context(branch.episode)
        except BaseException:
            self._branches.remove(branch)
            raise
        branch.is_open = True

    async def _sample(self, turn: TurnNode, plan: TurnPlan, shared: SharedCompletion, *, choice: int) -> None:
        """Sample the completion of a turn and publish it to `shared`, chunk by chunk if the request streams."""
        request, branch, episode = plan.request, turn.branch, turn.branch.episode
        context, prefix = beginning_of(plan, episode)
        num_tokens_before = len(episode.context)
        # Ids of calls stay the same when the turn is replayed. Some chat templates accept only ids of nine letters and
        # digits, which these are with fewer than 100 branches, 1,000 turns and 10 calls.
        turn_name = f"L{branch.number:02}T{episode.assistant_turns:03}"
        reader = turn_reader(
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
                if parsed.end is not None:
                    return chunk.stop_reason is not None
            return True

        timeout_s = self._context.limits.generate_timeout_s
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                completion = await episode.generate(
                    sampling_params_of(request, defaults=self._sampling_params, choice=choice),
                    on_token=publish if request.stream or reader.is_token_by_token else None,
                    prefix=() if plan.continued else prefix.token_ids,
                    continues_turn=plan.continued is not None,
                )
        except TimeoutError:
            if not limit.expired():
                raise
            detail = f"the completion took longer than {timeout_s:g} s (rollout.generate_timeout_s)"
            episode.note(IncidentKind.GENERATE_TIMEOUT, detail)
            episode.stop(StopReason.DEADLINE)
            raise EpisodeStopped(StopReason.DEADLINE) from None
        finally:
            branch.has_sampled_tokens = branch.has_sampled_tokens or len(episode.context) > num_tokens_before
        if completion.sampled.stop_reason == "aborted":
            raise ServerError("the completion was aborted on the server; send the request again")
        if not shared.chunks:
            for chunk in completion.sampled.chunks:
                publish(chunk)
        for call in completion.parsed.malformed_calls if request.tools_in_use else ():
            episode.note(IncidentKind.MALFORMED_CALL, f"{call.error} in {call.text[:200]!r}")

    def _complete(self, turn: TurnNode, plan: TurnPlan, shared: SharedCompletion) -> None:
        """Add a finished turn to the conversation tree."""
        episode, message = turn.branch.episode, sent_message(plan, shared.chunks)
        for detail in unmet_demands(plan, message):
            episode.note(IncidentKind.UNMET_REQUEST, detail)
        turn.after, turn.is_open = episode.mark(), episode.ends_in_open_turn
        turn.calls = {call_id: call for chunk in shared.chunks for call_id, call in chunk.calls.items()}
        [key] = message_keys([message])
        self._tree.complete(turn, key)


def _limit_error(reason: StopReason) -> LimitReached:
    """Return the error for a request in a conversation that has ended."""
    is_length = reason in (StopReason.RESPONSE_LENGTH, StopReason.PROMPT_LENGTH)
    return LimitReached(
        f"this conversation is over ({reason}): a limit of the rollout allows no further turn",
        param="messages",
        code=TOO_LONG if is_length else str(reason),
    )
