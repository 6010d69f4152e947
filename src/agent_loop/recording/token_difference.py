"""The first token in which two trajectories differ."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.trajectory import AgentLoopOutput

SHOWN_TOKENS = 12


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token in which a trajectory and its replay differ."""

    index: int
    """Index of the token, counted from the first token of the prompt."""
    old: tuple[int, ...]
    """The trajectory's tokens from there on, at most `SHOWN_TOKENS`. Empty if the trajectory has ended."""
    new: tuple[int, ...]
    """The same for the replay."""
    where: str
    """The trajectory's segment that holds the token, as in `tool tokens, assistant turn 2`."""


def first_difference(old: AgentLoopOutput, new: AgentLoopOutput) -> TokenDifference | None:
    """Return where two trajectories differ. Return None if all tokens are the same."""
    old_ids, new_ids = ([*o.prompt_ids.tolist(), *o.response_ids.tolist()] for o in (old, new))
    differing = (n for n, (a, b) in enumerate(zip(old_ids, new_ids, strict=False)) if a != b)
    index = next(differing, min(len(old_ids), len(new_ids)))
    if index == len(old_ids) == len(new_ids):
        return None
    shown = slice(index, index + SHOWN_TOKENS)
    return TokenDifference(index, tuple(old_ids[shown]), tuple(new_ids[shown]), _segment_of(old, index))


def _segment_of(output: AgentLoopOutput, index: int) -> str:
    """Describe the segment that holds a token."""
    turn, end = 0, 0
    for segment in output.segments:
        end += len(segment)
        turn += segment.weight_version is not None
        if index < end:
            return f"{segment.origin} tokens" + (f", assistant turn {turn}" if turn else "")
    return "after its last token"
