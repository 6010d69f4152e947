"""Parts of rewards by name. B rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from agent_loop.config.algorithm import OUTCOME
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.runtime.numeric import as_reward

logger = logging.getLogger(__name__)


def part_columns(batch: RolloutBatch, names: Iterable[str]) -> dict[str, str]:
    """Return the columns of a batch that hold parts of rewards, by the name of the part.

    A part that the reward function returned goes before a field of the loop (`extra_fields`) with the same name.
    """
    fields = cast(Any, batch)
    columns = set[str](fields.keys())
    found: dict[str, str] = {}
    for name in names:
        for column in (f"reward_extra.{name}", name, f"extra_fields.{name}"):
            if name != OUTCOME and column in columns and not isinstance(fields.get(column), Tensor):
                found[name] = column
                break
    return found


def collect_parts(batch: RolloutBatch, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parts of rewards by name, without the reward itself; [B] float64, NaN where a row has no number.

    Scored rows with a value that is not a number are reported in the log.

    Raises:
        DataError: A batch with scored rows has none of the parts.
    """
    names = [name for name in names if name != OUTCOME]
    columns, ids = part_columns(batch, names), list(batch["trajectory_id"])
    is_scored: list[bool] = batch["is_scored"].tolist()
    if names and not columns and any(is_scored):
        raise DataError(
            f"algorithm.reward_parts names {', '.join(names)}, and no trajectory has such a value; return them from "
            "the reward function beside 'reward'"
        )
    parts: dict[str, Tensor] = {}
    for name in names:
        values: list[Any] = list(batch[columns[name]]) if name in columns else [None] * len(ids)
        numbers = [as_reward(value) for value in values]
        wrong = [
            row
            for row, number in enumerate(numbers)
            if number is None and values[row] is not None and is_scored[row]
        ]
        if wrong:
            logger.warning(
                "the reward part %r of %s is %r, and %d more rows have no finite number either; the part does not "
                "count there",
                name,
                ids[wrong[0]],
                values[wrong[0]],
                len(wrong) - 1,
            )
        found = [torch.nan if number is None else number for number in numbers]
        parts[name] = torch.tensor(found, dtype=torch.float64)
    return parts
