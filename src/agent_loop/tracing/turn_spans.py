"""Assignment of spans to turns."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import chain

from agent_loop.runtime.activity import WaitKind
from agent_loop.trajectory import Span


class TurnSpans:
    """Spans of a trajectory, assigned to its turns.

    The branches of a row share their spans. A span that belongs to no turn of a branch belongs to another branch.

    Args:
        spans: Spans of the trajectory, in any order.
        num_prompt_tokens: Length of the prompt.
        is_branch: Whether other trajectories share the spans.
    """

    def __init__(self, spans: Iterable[Span], *, num_prompt_tokens: int, is_branch: bool) -> None:
        self.interactions: deque[Span] = deque()
        """Interactions that are not assigned to a turn yet."""
        self.others: list[Span] = []
        """Spans that belong to no turn."""
        self._num_prompt_tokens = num_prompt_tokens
        self._is_branch = is_branch
        self._tools: dict[int | None, list[Span]] = defaultdict(list)
        self._left: list[Span] = []
        """Spans of turns that this trajectory does not have."""
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
        """Return the completions whose context ended in a turn.

        Call it for the turns in order, so that each span is visited once.

        Args:
            start: Index of the turn's first token in prompt and response together.
            end: Index after the turn's last token.
        """
        found: list[Span] = []
        while self._completions and _context_of(self._completions[0]) < end:
            span = self._completions.popleft()
            (found if _context_of(span) >= start else self._left).append(span)
        exact = [span for span in found if _context_of(span) + (span.details.get("num_tokens") or 0) == end]
        return exact[:1] if self._is_branch and exact else found

    def calls(self, *, end: int) -> list[Span]:
        """Return the tool calls of the turn that ends at `end`, in the order of the calls."""
        calls = self._tools.pop(end - 1 - self._num_prompt_tokens, ())
        return sorted(calls, key=lambda span: span.details["number"])

    def next_interaction(self, *, after: float) -> Span | None:
        """Return the first interaction that starts at or after a time."""
        while self.interactions:
            span = self.interactions.popleft()
            if span.start >= after:
                return span
            self._left.append(span)
        return None

    def rest(self) -> list[Span]:
        """Return the spans that were assigned to no turn, sorted by start."""
        left = [*self.others]
        if not self._is_branch:
            left += [*self._left, *self._completions, *self.interactions]
            left += chain.from_iterable(self._tools.values())
        return sorted(left, key=lambda span: span.start)


def spans_of_branch(
    spans: Sequence[Span], *, turns: Iterable[tuple[int, int]], num_prompt_tokens: int
) -> list[Span]:
    """Return the spans without those that clearly belong to turns of other branches, so that branches stay small.

    Args:
        spans: Spans of all branches.
        turns: Start and end of each of the branch's turns, as in `TurnSpans.completions`.
        num_prompt_tokens: Length of the prompt.
    """
    by_turn = TurnSpans(spans, num_prompt_tokens=num_prompt_tokens, is_branch=True)
    own = [*by_turn.others, *by_turn.interactions]
    for start, end in turns:
        own += by_turn.completions(start=start, end=end)
        own += by_turn.calls(end=end)
    return sorted(own, key=lambda span: span.end)


def _context_of(span: Span) -> int:
    """Return the number of context tokens when a completion began."""
    return span.details.get("num_prompt_tokens", -1)
