"""Preference pairs of stored trajectories, for trainers of other libraries."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.storage.query import Condition, find
from agent_loop.storage.run import KEY, Key, StoredRun
from agent_loop.types import Message


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two conversations that answer the same prompt, of which one has a higher reward."""

    prompt: Sequence[Message]
    chosen: Sequence[Message]
    """Messages after the prompt in the trajectory with the higher reward."""
    rejected: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    chosen_reward: float
    rejected_reward: float

    def record(self) -> dict[str, Any]:
        """Return the pair as a row of a preference data set, in the conversational form of TRL."""
        return {
            "prompt": list(self.prompt),
            "chosen": list(self.chosen),
            "rejected": list(self.rejected),
            "tools": list(self.tools),
            "chosen_reward": self.chosen_reward,
            "rejected_reward": self.rejected_reward,
        }


def preference_pairs(run: StoredRun, *, where: Sequence[Condition] = ()) -> Iterator[PreferencePair]:
    """Yield the best and the worst trajectory of each group of a step whose rewards differ.

    Trajectories without a reward, and those whose conversation does not begin with the prompt of the other, are left
    out. Of equal rewards, the first trajectory counts.

    Args:
        run: The stored trajectories.
        where: Conditions that a trajectory must fulfil.

    Raises:
        DataError: A condition names an unknown column.
    """
    table = find(run, where=[*where, Condition("reward", "not_equal", None)])
    groups: defaultdict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in table.select([*KEY, "group", "reward"]).to_pylist():
        groups[row["split"], row["step"], row["group"]].append(row)
    extremes = [(max(rows, key=_reward), min(rows, key=_reward)) for rows in groups.values()]
    keys = [(_key(best), _key(worst)) for best, worst in extremes if _reward(best) > _reward(worst)]
    stored = {_key(row): _Answer.of(row) for row in run.rows_of(key for pair in keys for key in pair)}
    for best, worst in keys:
        pair = _pair(stored[best], stored[worst])
        if pair is not None:
            yield pair


@dataclass(frozen=True, slots=True)
class _Answer:
    """The part of a stored trajectory that a pair needs."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    reward: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> _Answer:
        return cls(json.loads(row["messages"]), json.loads(row["tool_schemas"]), row["reward"])


def _pair(best: _Answer, worst: _Answer) -> PreferencePair | None:
    chosen, rejected = best.messages, worst.messages
    num_prompt = next((n for n, message in enumerate(chosen) if message["role"] == "assistant"), None)
    if num_prompt is None or chosen[:num_prompt] != rejected[:num_prompt] or len(rejected) == num_prompt:
        return None
    return PreferencePair(
        prompt=chosen[:num_prompt],
        chosen=chosen[num_prompt:],
        rejected=rejected[num_prompt:],
        tools=best.tools,
        chosen_reward=best.reward,
        rejected_reward=worst.reward,
    )


def _key(row: Mapping[str, Any]) -> Key:
    return row["split"], row["step"], row["trajectory_id"]


def _reward(row: Mapping[str, Any]) -> float:
    return row["reward"]
