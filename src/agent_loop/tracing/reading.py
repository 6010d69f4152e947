"""An account as events. The work is linear in its tokens and spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from agent_loop.tracing.account import Account, Run
from agent_loop.tracing.bounded import bounded
from agent_loop.tracing.events import (
    Began,
    CalledTool,
    Ended,
    Event,
    Generated,
    Interacted,
    Lost,
    Observed,
    Prompted,
    Rewarded,
    Time,
    Tokens,
    Waited,
)
from agent_loop.tracing.turn_spans import TurnSpans
from agent_loop.tracing.words import TurnWords, words_of_turns
from agent_loop.trajectory import Feedback, Span
from agent_loop.types import Origin


def events_of(account: Account) -> list[Event]:
    """In the order of the conversation; spans that belong to no turn come after it."""
    reader = _Reader(account)
    prompts = [Prompted(run.tokens) for run in reader.runs if run.origin is Origin.PROMPT]
    said = chain.from_iterable(reader.events_of_run(run) for run in reader.runs)
    return [
        Began(account.attributes, account.began_at),
        *prompts,
        *said,
        *reader.other_spans(),
        *(Lost(i.assistant_turn, i.kind, i.detail) for i in account.incidents),
        Rewarded(account.reward, account.reward_extra),
        _end_of(account),
    ]


def _end_of(account: Account) -> Ended:
    num_prompt = account.num_prompt_tokens
    return Ended(
        stop_reason=account.stop_reason,
        seconds=account.seconds,
        num_turns=account.num_turns,
        num_prompt_tokens=num_prompt,
        num_response_tokens=sum(run.num_tokens for run in account.runs) - num_prompt,
        num_model_tokens=sum(run.num_tokens for run in account.runs if run.origin is Origin.MODEL),
        failure=account.failure,
    )


@dataclass(frozen=True, slots=True)
class _PlacedRun:
    origin: Origin
    tokens: Tokens
    weight_version: int | None
    turn: int
    """The assistant turn that it is, or that it follows; -1 before the first."""

    @property
    def start(self) -> int:
        return self.tokens.place

    @property
    def end(self) -> int:
        return self.tokens.place + self.tokens.count


class _Reader:
    """Tells of the runs, which have to be asked for in order."""

    def __init__(self, account: Account) -> None:
        self.runs = list(_placed(account.runs))
        self._num_prompt_tokens = account.num_prompt_tokens
        self._spans = TurnSpans(
            account.spans, num_prompt_tokens=self._num_prompt_tokens, is_branch=account.is_branch
        )
        self._words = words_of_turns(account.messages)
        self._generated_at = 0.0
        """When the turn that is read was there."""
        self._feedback: dict[tuple[Origin, int | None], list[Feedback]] = defaultdict(list)
        for each in account.feedback:
            self._feedback[each.origin, each.place].append(each)

    def events_of_run(self, run: _PlacedRun) -> Iterator[Event]:
        """What happened in a turn: the completion, then what it asked for. Or what came of that."""
        if run.origin is Origin.MODEL:
            yield from self._generated(run)
            yield from self._called(run)
            yield from self._interacted(run)
        elif run.origin is not Origin.PROMPT:
            yield Observed(run.turn, run.origin, run.tokens)

    def other_spans(self) -> Iterator[Event]:
        """Spans that are of no turn."""
        for span in self._spans.rest():
            yield Waited(span.kind, span.name, _time_of(span), _other_details(span))

    def _generated(self, run: _PlacedRun) -> Iterator[Generated]:
        """One event; where several servers had a part in the turn, one for each."""
        whole = Generated(run.turn, run.tokens, run.weight_version, time=None)
        spans = self._spans.completions(start=run.start, end=run.end)
        self._generated_at = max((span.end for span in spans), default=self._generated_at)
        for number, span in enumerate(spans):
            details, is_last = span.details, number + 1 == len(spans)
            place = details["num_prompt_tokens"]
            yield replace(
                whole,
                tokens=whole.tokens if is_last else Tokens(place, details.get("num_tokens") or 0, None, None),
                time=_time_of(span),
                server=span.name,
                prefill_s=details.get("prefill_s"),
                num_cached_tokens=details.get("num_cached_tokens"),
                num_preempted=details.get("num_preempted") or 0,
            )
        if not spans:
            yield whole

    def _called(self, run: _PlacedRun) -> Iterator[CalledTool]:
        feedback: Sequence[Feedback] = self._feedback[Origin.TOOL, self._place_of(run)]
        words = self._words_of(run)
        for span in self._spans.calls(end=run.end):
            number: int = span.details["number"]
            call = words.call(number)
            known = feedback[number] if number < len(feedback) else None
            yield CalledTool(
                turn=run.turn,
                number=number,
                name=span.name,
                time=_time_of(span),
                arguments=call.arguments,
                reply=call.reply,
                reward=None if known is None else known.reward,
                incident=None if known is None else known.incident,
            )

    def _interacted(self, run: _PlacedRun) -> Iterator[Interacted]:
        for feedback in self._feedback[Origin.INTERACTION, self._place_of(run)]:
            span = self._spans.next_interaction(after=self._generated_at)
            yield Interacted(
                turn=run.turn,
                time=None if span is None else _time_of(span),
                reply=self._words_of(run).said,
                reward=feedback.reward,
            )

    def _place_of(self, run: _PlacedRun) -> int:
        """Of its last token in the response."""
        return run.end - 1 - self._num_prompt_tokens

    def _words_of(self, run: _PlacedRun) -> TurnWords:
        return self._words[run.turn] if run.turn < len(self._words) else TurnWords()


def _placed(runs: Sequence[Run]) -> Iterator[_PlacedRun]:
    place, turn = 0, -1
    for run in runs:
        turn += run.origin is Origin.MODEL
        tokens = Tokens(place, run.num_tokens, run.token_ids, run.text)
        yield _PlacedRun(run.origin, tokens, run.weight_version, turn)
        place += run.num_tokens


def _other_details(span: Span) -> dict[str, Any]:
    return bounded({key: value for key, value in span.details.items() if key not in ("span", "within")})


def _time_of(span: Span) -> Time:
    return Time(span.start, span.end, span.details.get("span"), span.details.get("within"))
