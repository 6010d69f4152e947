"""Preference pairs of stored trajectories, for trainers of other libraries."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.storage.query import Condition, find
from agent_loop.storage.run import KEY, StoredRun
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
    for rows in groups.values():
        best = max(rows, key=lambda row: row["reward"])
        worst = min(rows, key=lambda row: row["reward"])
        if best["reward"] > worst["reward"]:
            pair = _pair(*(run.trajectory(*(row[name] for name in KEY)) for row in (best, worst)))
            if pair is not None:
                yield pair


def _pair(best: Mapping[str, Any], worst: Mapping[str, Any]) -> PreferencePair | None:
    chosen, rejected = (json.loads(row["messages"]) for row in (best, worst))
    num_prompt = next((n for n, message in enumerate(chosen) if message["role"] == "assistant"), None)
    if num_prompt is None or chosen[:num_prompt] != rejected[:num_prompt] or len(rejected) == num_prompt:
        return None
    return PreferencePair(
        prompt=chosen[:num_prompt],
        chosen=chosen[num_prompt:],
        rejected=rejected[num_prompt:],
        tools=json.loads(best["tool_schemas"]),
        chosen_reward=best["reward"],
        rejected_reward=worst["reward"],
    )
