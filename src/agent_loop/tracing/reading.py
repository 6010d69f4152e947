"""Conversion of an account to events, in time linear in its tokens and spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from agent_loop.tracing.account import Account, TokenRun
from agent_loop.tracing.bounded import bounded
from agent_loop.tracing.events import (
    AddedTokens,
    BeginEvent,
    EndEvent,
    Event,
    EventTime,
    GenerationEvent,
    IncidentEvent,
    InteractionEvent,
    ObservationEvent,
    PromptEvent,
    RewardEvent,
    SpanEvent,
    ToolCallEvent,
)
from agent_loop.tracing.turn_spans import TurnSpans
from agent_loop.tracing.turn_texts import TurnTexts, collect_turn_texts
from agent_loop.trajectory import Feedback, Span
from agent_loop.types import Origin


def events_of(account: Account) -> list[Event]:
    """Return the events of an account in the order of the conversation, then the spans that belong to no turn."""
    builder = _EventBuilder(account)
    prompts = [PromptEvent(run.tokens) for run in builder.runs if run.origin is Origin.PROMPT]
    turns = chain.from_iterable(builder.events_of_run(run) for run in builder.runs)
    return [
        BeginEvent(account.attributes, account.began_at),
        *prompts,
        *turns,
        *builder.other_spans(),
        *(IncidentEvent(i.assistant_turn, i.kind, i.detail) for i in account.incidents),
        RewardEvent(account.reward, account.reward_extra),
        _end_of(account),
    ]


def _end_of(account: Account) -> EndEvent:
    num_prompt = account.num_prompt_tokens
    return EndEvent(
        stop_reason=account.stop_reason,
        seconds=account.seconds,
        num_turns=account.num_turns,
        num_prompt_tokens=num_prompt,
        num_response_tokens=sum(run.num_tokens for run in account.runs) - num_prompt,
        num_model_tokens=sum(run.num_tokens for run in account.runs if run.origin is Origin.MODEL),
        failure=account.failure,
    )


@dataclass(frozen=True, slots=True)
class _TurnRun:
    origin: Origin
    tokens: AddedTokens
    weight_version: int | None
    turn: int
    """Number of the assistant turn that the run is or follows; -1 before the first turn."""

    @property
    def start(self) -> int:
        return self.tokens.place

    @property
    def end(self) -> int:
        return self.tokens.place + self.tokens.count


class _EventBuilder:
    """Builder of the events of an account. `events_of_run` has to be called for the runs in order."""

    def __init__(self, account: Account) -> None:
        self.runs = list(_with_turns(account.runs))
        self._num_prompt_tokens = account.num_prompt_tokens
        self._spans = TurnSpans(
            account.spans, num_prompt_tokens=self._num_prompt_tokens, is_branch=account.is_branch
        )
        self._turn_texts = collect_turn_texts(account.messages)
        self._generated_at = 0.0
        """Time at which the current turn was complete."""
        self._feedback: dict[tuple[Origin, int | None], list[Feedback]] = defaultdict(list)
        for each in account.feedback:
            self._feedback[each.origin, each.place].append(each)

    def events_of_run(self, run: _TurnRun) -> Iterator[Event]:
        """Yield the events of a run.

        A run of the model yields its completion, tool calls and interactions. A reply yields an observation.
        """
        if run.origin is Origin.MODEL:
            yield from self._generated(run)
            yield from self._called(run)
            yield from self._interacted(run)
        elif run.origin is not Origin.PROMPT:
            yield ObservationEvent(run.turn, run.origin, run.tokens)

    def other_spans(self) -> Iterator[Event]:
        """Yield the spans that belong to no turn."""
        for span in self._spans.rest():
            yield SpanEvent(span.kind, span.name, _time_of(span), _other_details(span))

    def _generated(self, run: _TurnRun) -> Iterator[GenerationEvent]:
        """Yield one event, or one per server if several servers sampled parts of the turn."""
        whole = GenerationEvent(run.turn, run.tokens, run.weight_version, time=None)
        spans = self._spans.completions(start=run.start, end=run.end)
        self._generated_at = max((span.end for span in spans), default=self._generated_at)
        for number, span in enumerate(spans):
            details, is_last = span.details, number + 1 == len(spans)
            start = details["num_prompt_tokens"]
            yield replace(
                whole,
                tokens=whole.tokens
                if is_last
                else AddedTokens(start, details.get("num_tokens") or 0, None, None),
                time=_time_of(span),
                server=span.name,
                prefill_s=details.get("prefill_s"),
                num_cached_tokens=details.get("num_cached_tokens"),
                num_preempted=details.get("num_preempted") or 0,
            )
        if not spans:
            yield whole

    def _called(self, run: _TurnRun) -> Iterator[ToolCallEvent]:
        feedback: Sequence[Feedback] = self._feedback[Origin.TOOL, self._last_index_of(run)]
        turn_texts = self._turn_texts_of(run)
        for span in self._spans.calls(end=run.end):
            number: int = span.details["number"]
            call = turn_texts.call(number)
            known = feedback[number] if number < len(feedback) else None
            yield ToolCallEvent(
                turn=run.turn,
                number=number,
                name=span.name,
                time=_time_of(span),
                arguments=call.arguments,
                reply=call.reply,
                reward=None if known is None else known.reward,
                incident=None if known is None else known.incident,
            )

    def _interacted(self, run: _TurnRun) -> Iterator[InteractionEvent]:
        for feedback in self._feedback[Origin.INTERACTION, self._last_index_of(run)]:
            span = self._spans.next_interaction(after=self._generated_at)
            yield InteractionEvent(
                turn=run.turn,
                time=None if span is None else _time_of(span),
                reply=self._turn_texts_of(run).user_text,
                reward=feedback.reward,
            )

    def _last_index_of(self, run: _TurnRun) -> int:
        """Return the index of the run's last token in the response."""
        return run.end - 1 - self._num_prompt_tokens

    def _turn_texts_of(self, run: _TurnRun) -> TurnTexts:
        return self._turn_texts[run.turn] if run.turn < len(self._turn_texts) else TurnTexts()


def _with_turns(runs: Sequence[TokenRun]) -> Iterator[_TurnRun]:
    start, turn = 0, -1
    for run in runs:
        turn += run.origin is Origin.MODEL
        tokens = AddedTokens(start, run.num_tokens, run.token_ids, run.text)
        yield _TurnRun(run.origin, tokens, run.weight_version, turn)
        start += run.num_tokens


def _other_details(span: Span) -> dict[str, Any]:
    return bounded({key: value for key, value in span.details.items() if key not in ("span", "within")})


def _time_of(span: Span) -> EventTime:
    return EventTime(span.start, span.end, span.details.get("span"), span.details.get("within"))
