"""One program's conversations with the model, recorded to the token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from agent_loop.completions.conversation import conversation_of
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.episode import EpisodeStopped
from agent_loop.episode.turn_log import ReplayMismatch
from agent_loop.errors import AgentLoopError, JournalError, RequestError, ServerError
from agent_loop.gateway.branches import Branches
from agent_loop.gateway.conversation_tree import ConversationTree, TreePosition, TurnNode
from agent_loop.gateway.errors import GatewayBug, LimitReached, limit_error
from agent_loop.gateway.message_keys import message_keys
from agent_loop.gateway.retries import CompletionIndex, RetryInfo, fingerprint_of
from agent_loop.gateway.shared_completion import SharedCompletion
from agent_loop.gateway.turn_generator import TurnGenerator
from agent_loop.loops.base import LoopContext
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.trajectory import AgentLoopOutput, Failure
from agent_loop.types import Message, StopReason

CLOSE_TIMEOUT_S = 15.0
MAX_BRANCHES = 64
ABORTED = "the completion was aborted: its session ended, or nobody waited for it any more"


class Session:
    """The requests of one program, each put where it belongs in the conversations that the program leads.

    A request that goes on from what the model said is bridged: earlier tokens are neither rendered nor encoded again.
    One that goes on from an earlier place branches there; any other conversation begins anew. Single use, with
    `async with`, which ends what is under way.

    Args:
        context: The servers, the chat template, and the limits, which hold for each conversation; the deadline is the
            program's.
        sampling_params: Of requests that do not say.
        max_branches: More conversations than this are refused.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        sampling_params: Mapping[str, Any] | None = None,
        max_branches: int = MAX_BRANCHES,
    ) -> None:
        self.session_id = secrets.token_urlsafe(16)
        self.api_key = secrets.token_urlsafe(24)
        self.fault: Exception | None = None
        """What must not be answered to the program alone: the run has to know."""
        self.was_refused = False
        """The last request was refused because of a limit."""
        self._lanes = Branches(context, max_branches=max_branches)
        self._tree = ConversationTree()
        self._speaker = TurnGenerator(
            context, lanes=self._lanes, tree=self._tree, sampling_params=sampling_params or {}
        )
        self._answers = CompletionIndex()
        self._running: set[asyncio.Task[None]] = set()
        self.deadline = asyncio.timeout(context.limits.deadline_s)
        """For the program to run in, with `async with`."""
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
        """Ends every conversation that is not over with this reason; what is under way is aborted, its tokens kept."""

        async def end() -> None:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running)
            await self._lanes.close(reason)

        await run_shielded(end, timeout_s=CLOSE_TIMEOUT_S)

    def ask(self, request: ChatCompletionRequest, *, attempt: RetryInfo) -> SharedCompletion:
        """Takes a request; the answer comes by listening to what is returned.

        Raises:
            RequestError: It asks for what is not offered.
            LimitReached: The time is up, or the program leads too many conversations.
        """
        if self.deadline.expired():
            raise limit_error(StopReason.DEADLINE)
        if request.num_choices != 1:
            raise RequestError(
                f"n is {request.n}; a conversation goes on with one answer: send the request as often as you want "
                "answers",
                param="n",
            )
        if request.continue_final_message:
            raise RequestError(
                "continue_final_message: an answer that a program began cannot be continued in a session, where all "
                "answers are the model's; end with a user's message or a tool's",
                param="continue_final_message",
            )
        messages = conversation_of(request.messages)
        forms = message_keys(messages)
        fingerprint = fingerprint_of(request, forms)
        known = self._answers.find(fingerprint, attempt)
        if known is not None:
            return known
        place = self._tree.locate(messages, forms, tools=request.tools_in_use)
        try:
            turn = self._claimed(place, messages, request)
        except LimitReached as error:
            self.was_refused = True
            self._lanes.note_failure(error)
            raise
        answer = SharedCompletion()
        self._answers.add(fingerprint, attempt, answer)
        task = self._tasks.create_task(self._answered(request, messages, turn, answer))
        self._running.add(task)
        task.add_done_callback(partial(self._ended, answer))
        answer.task = task
        return answer

    def outputs(
        self,
        *,
        reward: float | None = None,
        extra_fields: Mapping[str, Any] | None = None,
        failure: Failure | None = None,
    ) -> list[AgentLoopOutput]:
        """One record for each way in which the conversations went on; none if nothing was asked.

        Branches hold the same segments for what they have in common, which is trained once.

        Args:
            reward: What all of them are worth; None leaves it to the reward function.
            extra_fields: Whatever else to hand on.
            failure: What made the program fail. The first record carries it, so that it counts once; the others are
                cancelled.
        """
        outputs = [
            lane.episode.output(reward_score=reward, extra_fields=extra_fields)
            for lane in self._lanes.recorded
        ]
        if failure is None or not outputs:
            return outputs
        first, *others = outputs
        return [first.failed(failure), *(replace(o, stop_reason=StopReason.CANCELLED) for o in others)]

    # -- where a request belongs -----------------------------------------------------------------------------------

    def _claimed(
        self, place: TreePosition, messages: Sequence[Message], request: ChatCompletionRequest
    ) -> TurnNode:
        """A turn on a lane that stands where the request belongs and is its own. Nothing is awaited, so that of two
        requests at once each finds what the other has taken."""
        for turn in self._tree.turns_at(place):
            if turn.lane.is_free_at(turn.before):  # (its completion failed before it gave a token)
                turn.lane.is_busy = True
                return turn
        turn = self._new_turn(place, messages, request)
        self._tree.add(turn)
        return turn

    def _new_turn(
        self, place: TreePosition, messages: Sequence[Message], request: ChatCompletionRequest
    ) -> TurnNode:
        parent = place.parent
        if parent is not None and parent.lane.is_free_at(parent.after):
            parent.lane.is_busy = True
            return TurnNode(parent.lane, place)
        for turn in self._tree.turns_at(place):
            if turn.before is not None:
                return TurnNode(self._lanes.branch(turn.lane, at=turn.before), place, before=turn.before)
        if parent is not None and parent.after is not None:
            return TurnNode(self._lanes.branch(parent.lane, at=parent.after), place)
        return TurnNode(self._lanes.new(messages, tools=request.tools_in_use), place)

    # -- the answer ------------------------------------------------------------------------------------------------

    async def _answered(
        self,
        request: ChatCompletionRequest,
        messages: Sequence[Message],
        turn: TurnNode,
        answer: SharedCompletion,
    ) -> None:
        """The edge of a request: whatever happens is its answer."""
        try:
            await self._speaker.answer(request, messages, turn=turn, answer=answer)
        except EpisodeStopped as stopped:
            self._fail(turn, answer, limit_error(stopped.reason))
        except JournalError as error:
            self.fault = error
            self._fail(turn, answer, error)
        except ReplayMismatch as error:  # (which no second try would mend)
            self._fail(turn, answer, RequestError(str(error), code="replay_mismatch"))
        except AgentLoopError as error:
            self._fail(turn, answer, error)
        except asyncio.CancelledError:
            turn.lane.episode.stop(self._reason_of_cancellation)
            answer.end(ServerError(ABORTED))
            raise
        except Exception as error:  # noqa: BLE001  (the run is told, with the traceback)
            self.fault = error
            self._fail(turn, answer, GatewayBug(f"{type(error).__name__}: {error}"))
        else:
            self.was_refused = False
            answer.end()
        finally:
            turn.lane.is_busy = False

    def _fail(self, turn: TurnNode, answer: SharedCompletion, error: AgentLoopError) -> None:
        self.was_refused = isinstance(error, LimitReached)
        self._lanes.note_failure(error, lane=turn.lane)
        answer.end(error)

    def _ended(self, answer: SharedCompletion, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before it began answers too."""
        self._running.discard(task)
        answer.end(ServerError(ABORTED))

    @property
    def _reason_of_cancellation(self) -> StopReason:
        return StopReason.DEADLINE if self.deadline.expired() else StopReason.CANCELLED
