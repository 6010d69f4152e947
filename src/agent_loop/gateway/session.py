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
from agent_loop.concurrency import run_shielded
from agent_loop.episode import EpisodeStopped
from agent_loop.errors import AgentLoopError, ChatTemplateError, JournalError, RequestError, ServerError
from agent_loop.gateway.answer import Answer
from agent_loop.gateway.errors import GatewayBug, LimitReached, limit_reached
from agent_loop.gateway.history import links
from agent_loop.gateway.lanes import Lane, Lanes
from agent_loop.gateway.retries import Attempt, KnownAnswers, fingerprint_of
from agent_loop.gateway.tree import Place, Turn, TurnTree
from agent_loop.gateway.voice import Voice
from agent_loop.loops.base import LoopContext
from agent_loop.trajectory import AgentLoopOutput, Failure, IncidentKind
from agent_loop.turn_log import ReplayMismatch
from agent_loop.types import Message, SamplingParams, StopReason

CLOSE_TIMEOUT_S = 15.0
MAX_BRANCHES = 64
ABORTED = "the completion was aborted: nobody waits for it any more"
SAMPLING_FIELDS = ("temperature", "top_p", "top_k")


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
        self._template = context.template
        self._sampling_params = dict(sampling_params or {})
        self._max_branches = max_branches
        self._lanes = Lanes(context)
        self._tree = TurnTree()
        self._answers = KnownAnswers()
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

    def ask(self, request: ChatCompletionRequest, *, attempt: Attempt) -> Answer:
        """Takes a request; the answer comes by listening to what is returned.

        Raises:
            RequestError: It asks for what is not offered.
        """
        if request.num_choices != 1:
            raise RequestError(
                f"n is {request.n}; a conversation goes on with one answer: send the request as often as you want "
                "answers",
                param="n",
            )
        messages = conversation_of(request.messages)
        forms = links(messages)
        fingerprint = fingerprint_of(request, forms)
        known = self._answers.find(fingerprint, attempt)
        if known is not None:
            return known
        place = self._tree.place_of(messages, forms, tools=request.tools_in_use)
        turn = self._claimed(place, messages, request)
        answer = Answer()
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
        lanes = self._lanes.of_record
        if failure is not None:
            for lane in lanes[1:]:
                lane.episode.stop_reason = StopReason.CANCELLED
        return [
            lane.episode.output(
                reward_score=reward,
                extra_fields=extra_fields,
                failure=failure if lane is lanes[0] else None,
            )
            for lane in lanes
        ]

    # -- where a request belongs -----------------------------------------------------------------------------------

    def _claimed(self, place: Place, messages: Sequence[Message], request: ChatCompletionRequest) -> Turn:
        """A turn on a lane that stands where the request belongs and is its own. Nothing is awaited, so that of two
        requests at once each finds what the other has taken."""
        for turn in self._tree.turns_that_asked(place):
            if turn.lane.stands_at(turn.before):  # (its completion failed before it gave a token)
                turn.lane.is_busy = True
                return turn
        turn = self._new_turn(place, messages, request)
        self._tree.add(turn)
        return turn

    def _new_turn(self, place: Place, messages: Sequence[Message], request: ChatCompletionRequest) -> Turn:
        parent = place.parent
        if parent is not None and parent.lane.stands_at(parent.after):
            parent.lane.is_busy = True
            return Turn(parent.lane, place)
        self._refuse_if_too_many()
        for turn in self._tree.turns_that_asked(place):
            if turn.before is not None:
                return Turn(self._lanes.branch(turn.lane, at=turn.before), place, before=turn.before)
        if parent is not None and parent.after is not None:
            return Turn(self._lanes.branch(parent.lane, at=parent.after), place)
        return Turn(self._lanes.new(messages, tools=request.tools_in_use), place)

    def _refuse_if_too_many(self) -> None:
        if len(self._lanes) < self._max_branches:
            return
        error = LimitReached(
            f"this program has led {self._max_branches} conversations; raise max_branches if it needs more",
            code="too_many_branches",
        )
        self._note_failure(None, error)
        raise error

    # -- the answer ------------------------------------------------------------------------------------------------

    async def _answered(
        self, request: ChatCompletionRequest, messages: Sequence[Message], turn: Turn, answer: Answer
    ) -> None:
        """The edge of a request: whatever happens is its answer."""
        try:
            await self._reach(turn, messages, request)
            await self._speak(turn, request, answer)
        except EpisodeStopped as stopped:
            self._fail(turn, answer, limit_reached(stopped.reason))
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

    async def _reach(self, turn: Turn, messages: Sequence[Message], request: ChatCompletionRequest) -> None:
        """Brings the turn's lane to where the model is to speak."""
        await self._lanes.open(turn.lane)
        if turn.before is None and turn.place.parent is not None:
            try:
                added = _for_episode(turn.place.added, turn.place.parent)
                if not await turn.lane.episode.observe(added):
                    raise EpisodeStopped(StopReason.RESPONSE_LENGTH)
            except ChatTemplateError:
                # What was added cannot be written behind a turn, but perhaps in a conversation as a whole.
                self._refuse_if_too_many()
                turn.lane.is_busy = False
                turn.lane = self._lanes.new(messages, tools=request.tools_in_use)
                await self._lanes.open(turn.lane)
        turn.before = turn.lane.episode.mark()

    async def _speak(self, turn: Turn, request: ChatCompletionRequest, answer: Answer) -> None:
        lane, episode = turn.lane, turn.lane.episode
        num_before = len(episode.context)
        voice = Voice(
            request,
            answer,
            template=self._template,
            prompt_ids=episode.context,
            turn_name=f"L{lane.number:02}T{episode.assistant_turns:03}",
        )
        hear = voice.hear if request.stream or request.stops else None
        try:
            completion = await episode.generate(self._params(request), hear=hear)
        finally:
            lane.has_spoken = lane.has_spoken or len(episode.context) > num_before
        if completion.sampled.stop_reason == "aborted":
            raise ServerError("the completion was aborted on the server; send it again")
        if request.logprobs and completion.sampled.log_probs is None:
            raise RequestError("logprobs: this server gives none; leave it out", param="logprobs")
        voice.finish(completion)
        for call in completion.parsed.malformed_calls if request.tools_in_use else ():
            episode.note(IncidentKind.MALFORMED_CALL, f"{call.error} in {call.text[:200]!r}")
        turn.after, turn.calls = episode.mark(), voice.calls
        [said] = links([voice.message])
        self._tree.complete(turn, said)

    def _params(self, request: ChatCompletionRequest) -> SamplingParams:
        """As the request says, and where it does not, as the run does."""
        params = request.sampling_params(max_tokens=request.max_new_tokens, choice=0)
        given = {name for name in SAMPLING_FIELDS if getattr(request, name) is not None}
        return replace(
            params, **{name: value for name, value in self._sampling_params.items() if name not in given}
        )

    def _fail(self, turn: Turn, answer: Answer, error: AgentLoopError) -> None:
        self._note_failure(turn.lane, error)
        answer.end(error)

    def _note_failure(self, lane: Lane | None, error: AgentLoopError) -> None:
        """Names the request on its lane, or where the model did not speak there, on the first that is of record."""
        self.was_refused = isinstance(error, LimitReached)
        if lane is None or not lane.has_spoken:
            lane = next(iter(self._lanes.of_record), lane)
        if lane is not None:
            lane.episode.note(IncidentKind.FAILED_REQUEST, str(error))

    def _ended(self, answer: Answer, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before it began answers too."""
        self._running.discard(task)
        answer.end(ServerError(ABORTED))

    @property
    def _reason_of_cancellation(self) -> StopReason:
        return StopReason.DEADLINE if self.deadline.expired() else StopReason.CANCELLED


def _for_episode(added: Sequence[Message], parent: Turn) -> list[Message]:
    """Messages behind a turn; tool messages name the call as the model wrote it."""
    written: list[Message] = []
    for message in added:
        call = parent.calls.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and call is not None:
            message = {"role": "tool", "content": message["content"], "name": call.name}
            message |= {"tool_call_id": call.id} if call.id else {}
        written.append(message)
    return written
