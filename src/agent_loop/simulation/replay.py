"""Conversion of recorded trajectories to plans for a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from agent_loop.errors import DataError
from agent_loop.files.file_kinds import RECORDS, STORED_TRAJECTORIES, explain, kind_of
from agent_loop.files.plain_values import parse_json
from agent_loop.simulation.workload import PlannedTurn, TrajectoryPlan
from agent_loop.storage.json_lines import read_lines
from agent_loop.storage.run import StoredRun
from agent_loop.types import Origin

ENDS = frozenset({".parquet", ".jsonl"})
"""Ends of the names of files that are read of a folder."""


def read_plans(path: Path) -> list[TrajectoryPlan]:
    """Return the plans of recorded trajectories.

    A record holds the tokens of each turn and the total time of the tools, which is spread evenly over the replies.
    Trajectories without sampled tokens are skipped.

    Args:
        path: File that `agent-loop rollout` or `eval` wrote, or a folder that is searched for such files.

    Raises:
        DataError: There are no records, or one cannot be read.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix in ENDS) if path.is_dir() else [path]
    plans: list[TrajectoryPlan] = []
    for record in _records(files):
        plan = _plan(record, number=len(plans))
        if plan is not None:
            plans.append(plan)
    if not plans:
        raise DataError(
            f"{str(path)!r} holds no recorded trajectories; give the file that `agent-loop rollout --out` wrote, or a "
            "folder of such files"
        )
    return plans


def repeat_plans(plans: Sequence[TrajectoryPlan], *, times: int) -> list[TrajectoryPlan]:
    """Return the plans repeated `times` times, each time as new groups, so that a small run stands for a large one."""
    num_groups = max((plan.group for plan in plans), default=0) + 1
    return [
        TrajectoryPlan(
            f"{plan.group + time * num_groups}/{number + time * len(plans)}",
            plan.group + time * num_groups,
            plan.num_prompt_tokens,
            plan.turns,
        )
        for time in range(times)
        for number, plan in enumerate(plans)
    ]


def _records(files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    for file in files:
        if not file.is_file():
            raise DataError(f"{str(file)!r} does not exist; give the trajectories of a rollout")
        kind = kind_of(file)
        if kind is STORED_TRAJECTORIES:
            yield from StoredRun(file).rows()
        elif kind is RECORDS:
            yield from read_lines(file)
        elif len(files) == 1:
            raise DataError(explain(file, wanted="a file that `agent-loop rollout --out` wrote"))


def _plan(record: Mapping[str, Any], *, number: int) -> TrajectoryPlan | None:
    """Return the plan of a record. Consecutive model segments form a turn; other segments form a reply."""
    runs = [
        (is_model, sum(segment["num_tokens"] for segment in segments))
        for is_model, segments in groupby(record["segments"], key=lambda s: s["origin"] == Origin.MODEL)
    ]
    if not runs or runs[0][0] or len(runs) < 2:
        return None
    sampled, replies = (
        [n for is_model, n in runs[1:] if is_model],
        [n for is_model, n in runs[1:] if not is_model],
    )
    waits = len(sampled) - 1
    tool_s = float(parse_json(record["metrics"]).get("tool_calls", 0.0)) / max(waits, 1)
    turns = tuple(
        PlannedTurn(
            max(num_tokens, 1), tool_s if turn < waits else 0.0, replies[turn] if turn < len(replies) else 0
        )
        for turn, num_tokens in enumerate(sampled)
    )
    group = int(record.get("group", 0))
    return TrajectoryPlan(f"{group}/{number}", group, max(runs[0][1], 1), turns)
