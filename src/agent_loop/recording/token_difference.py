"""Comparison of the tokens of two trajectories."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.trajectory import AgentLoopOutput

SHOWN_TOKENS = 12
"""Maximum number of tokens that a `TokenDifference` holds of each side."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """First token in which a trajectory and its replay differ."""

    index: int
    """Index of the token, counted from the first token of the prompt."""
    old: tuple[int, ...]
    """Tokens of the trajectory from `index`, at most `SHOWN_TOKENS`. Empty if the trajectory is shorter."""
    new: tuple[int, ...]
    """Tokens of the replay from `index`, at most `SHOWN_TOKENS`. Empty if the replay is shorter."""
    where: str
    """Segment of the trajectory that contains the token, for example `tool tokens, assistant turn 2`."""


def first_difference(old: AgentLoopOutput, new: AgentLoopOutput) -> TokenDifference | None:
    """Return the first difference of two trajectories, or None if all tokens are equal."""
    old_ids, new_ids = ([*o.prompt_ids.tolist(), *o.response_ids.tolist()] for o in (old, new))
    differing = (n for n, (a, b) in enumerate(zip(old_ids, new_ids, strict=False)) if a != b)
    index = next(differing, min(len(old_ids), len(new_ids)))
    if index == len(old_ids) == len(new_ids):
        return None
    shown = slice(index, index + SHOWN_TOKENS)
    return TokenDifference(index, tuple(old_ids[shown]), tuple(new_ids[shown]), _segment_of(old, index))


def _segment_of(output: AgentLoopOutput, index: int) -> str:
    """Return a description of the segment that contains a token."""
    turn, end = 0, 0
    for segment in output.segments:
        end += len(segment)
        turn += segment.weight_version is not None
        if index < end:
            return f"{segment.origin} tokens" + (f", assistant turn {turn}" if turn else "")
    return "after its last token"
