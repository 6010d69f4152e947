"""The trajectories of a real run, as plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from agent_loop.errors import DataError
from agent_loop.files.file_kinds import explain, kind_of
from agent_loop.files.plain_values import parse_json
from agent_loop.simulation.workload import Plan, Turn
from agent_loop.types import Origin


def read_plans(path: Path) -> list[Plan]:
    """The plans of recorded trajectories: a file as `agent-loop rollout` and `eval` write it, or a folder in which to
    look for such files.

    A record holds the tokens of each turn, and the time that its tools took in all, which is spread evenly over the
    replies. Trajectories of which the model said nothing are left out.

    Raises:
        DataError: There are no records, or one cannot be read.
    """
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    plans: list[Plan] = []
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


def repeated(plans: Sequence[Plan], *, times: int) -> list[Plan]:
    """The plans so many times over, each time as other groups: a small run as the sample of a large one."""
    num_groups = max((plan.group for plan in plans), default=0) + 1
    return [
        Plan(
            f"{plan.group + time * num_groups}/{number + time * len(plans)}",
            plan.group + time * num_groups,
            plan.num_prompt_tokens,
            plan.turns,
        )
        for time in range(times)
        for number, plan in enumerate(plans)
    ]


def _records(files: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    for file in files:
        if not file.is_file():
            raise DataError(f"{str(file)!r} does not exist; give the records of a run")
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    record = parse_json(line)
                except ValueError as error:
                    if number == 1 and kind_of(file) is not None:
                        raise DataError(
                            explain(file, wanted="what `agent-loop rollout --out` wrote")
                        ) from error
                    raise DataError(f"{str(file)!r} line {number} is not JSON: {error}") from error
                if isinstance(record, dict) and "segments" in record:
                    yield cast(Mapping[str, Any], record)


def _plan(record: Mapping[str, Any], *, number: int) -> Plan | None:
    """Consecutive segments of the model are one turn; whatever stands between two turns is a reply."""
    runs = [
        (is_model, sum(len(segment["token_ids"]) for segment in segments))
        for is_model, segments in groupby(record["segments"], key=lambda s: s["origin"] == Origin.MODEL)
    ]
    if not runs or runs[0][0] or len(runs) < 2:
        return None
    said, replies = (
        [n for is_model, n in runs[1:] if is_model],
        [n for is_model, n in runs[1:] if not is_model],
    )
    waits = len(said) - 1
    tool_s = float(record.get("metrics", {}).get("tool_calls", 0.0)) / max(waits, 1)
    turns = tuple(
        Turn(max(num_tokens, 1), tool_s if turn < waits else 0.0, replies[turn] if turn < len(replies) else 0)
        for turn, num_tokens in enumerate(said)
    )
    group = int(record.get("group", 0))
    return Plan(f"{group}/{number}", group, max(runs[0][1], 1), turns)
