"""Which spans are of which turn."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain

from agent_loop.runtime.activity import WaitKind
from agent_loop.trajectory import Span


class TurnSpans:
    """Gives every span to the turn that it is of. Spans are shared by the branches of a row: what belongs to no turn of
    a branch is another one's.

    Args:
        spans: Of the trajectory, in any order.
        num_prompt_tokens: Where its response begins.
        is_branch: Whether other trajectories have the same spans.
    """

    def __init__(self, spans: Iterable[Span], *, num_prompt_tokens: int, is_branch: bool) -> None:
        self.interactions: deque[Span] = deque()
        """Those that were given to no turn yet."""
        self.others: list[Span] = []
        """Those that are of no turn."""
        self._num_prompt_tokens = num_prompt_tokens
        self._is_branch = is_branch
        self._tools: dict[int | None, list[Span]] = defaultdict(list)
        self._left: list[Span] = []
        """Of turns that are not among this trajectory's."""
        completions: list[Span] = []
        for span in sorted(spans, key=lambda span: span.start):
            if span.kind == WaitKind.GENERATE:
                completions.append(span)
            elif span.kind == WaitKind.TOOL:
                self._tools[span.details.get("place")].append(span)
            else:
                (self.interactions if span.kind == WaitKind.INTERACTION else self.others).append(span)
        self._completions = deque(sorted(completions, key=_context_of))

    def completions(self, *, start: int, end: int) -> list[Span]:
        """Those whose context ended in the turn, which is asked for after those before it: so each span is looked at
        once.

        Args:
            start: Place of the turn's first token in prompt and response together.
            end: The place behind its last token.
        """
        found: list[Span] = []
        while self._completions and _context_of(self._completions[0]) < end:
            span = self._completions.popleft()
            (found if _context_of(span) >= start else self._left).append(span)
        exact = [span for span in found if _context_of(span) + (span.details.get("num_tokens") or 0) == end]
        return exact[:1] if self._is_branch and exact else found

    def calls(self, *, end: int) -> list[Span]:
        """The calls that a turn asked for which ends there, in its order."""
        asked = self._tools.pop(end - 1 - self._num_prompt_tokens, ())
        return sorted(asked, key=lambda span: span.details["number"])

    def next_interaction(self, *, after: float) -> Span | None:
        """The first one behind a time."""
        while self.interactions:
            span = self.interactions.popleft()
            if span.start >= after:
                return span
            self._left.append(span)
        return None

    def rest(self) -> list[Span]:
        """What was given to no turn, by its start."""
        left = [*self.others]
        if not self._is_branch:
            left += [*self._left, *self._completions, *self.interactions]
            left += chain.from_iterable(self._tools.values())
        return sorted(left, key=lambda span: span.start)


def spans_of_branch(
    spans: Sequence[Span], *, turns: Iterable[tuple[int, int]], num_prompt_tokens: int
) -> list[Span]:
    """Without those of other branches' turns, as far as they can be told, so that many branches do not each have all.

    Args:
        spans: Of all branches.
        turns: Start and end of each of the branch's turns, as in `TurnSpans.completions`.
        num_prompt_tokens: Where its response begins.
    """
    by_turn = TurnSpans(spans, num_prompt_tokens=num_prompt_tokens, is_branch=True)
    own = [*by_turn.others, *by_turn.interactions]
    for start, end in turns:
        own += by_turn.completions(start=start, end=end)
        own += by_turn.calls(end=end)
    return sorted(own, key=lambda span: span.end)


def _context_of(span: Span) -> int:
    """Tokens of prompt and response when a completion began."""
    return span.details.get("num_prompt_tokens", -1)
