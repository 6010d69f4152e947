"""Sources of supervised training: checks of the settings, and stored trajectories (rejection sampling, best of n)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from agent_loop.config import AlgorithmConfig, Config, PlacementConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.files.file_kinds import EVALUATION, RUN, STORED_TRAJECTORIES, kind_of
from agent_loop.storage.columns import to_trajectory
from agent_loop.storage.query import Condition, find
from agent_loop.storage.run import FOLDER, KEY, StoredRun
from agent_loop.storage.vocabulary import pieces_of
from agent_loop.trajectory import Segment, Trajectory
from agent_loop.types import Origin


def check_sources(config: Config) -> None:
    """Check that there are sources of examples."""
    if not config.sft.files:
        raise ConfigError(
            "sft.files is empty; give at least one file of conversations, or the folder of a run"
        )
    if config.trainer.val_every is not None and not config.sft.val_files:
        raise ConfigError(
            "validation is switched on but sft.val_files is empty; give it conversations, or unset trainer.val_every"
        )


def supervised_config(config: Config) -> Config:
    """Return the settings of a supervised run: without critic and reference model, at temperature 1."""
    check_sources(config)
    return config.model_copy(
        update={
            "algorithm": AlgorithmConfig(),
            "actor": config.actor.model_copy(update={"kl_loss_coef": 0.0, "reference_path": None}),
            "rollout": config.rollout.model_copy(
                update={
                    "engine": "embedded",  # there are no servers, so the trainer takes the first devices
                    "temperature": 1.0,
                    "prompt_length": 1,
                    "response_length": config.sft.max_tokens,
                }
            ),
            "placement": PlacementConfig(),
        }
    )


_Found: TypeAlias = tuple[str, int, Trajectory]
"""Split, step and trajectory."""


def is_stored(source: str) -> bool:
    """Return whether a source of examples holds stored trajectories."""
    path = Path(source)
    return path.exists() and (
        kind_of(path) in (RUN, EVALUATION, STORED_TRAJECTORIES) or (path / FOLDER).is_dir()
    )


def stored_segments(
    source: str, *, where: Sequence[str], best_of_group: int | None, tokenizer: Any
) -> list[Sequence[Segment]]:
    """Return the segments of the stored trajectories that fulfil the conditions, in the order of the files.

    The beginning that a branch shares with an earlier branch of its rollout is trained in the earlier one only.
    """
    run = StoredRun(source)
    pieces = run.vocabulary()
    if pieces is not None and pieces != pieces_of(tokenizer):
        raise DataError(
            f"{source!r} holds trajectories of a model with another vocabulary than that of model.path; give the "
            "messages of the trajectories as conversations, or train a model with that vocabulary"
        )
    found = find(run, where=[Condition.parse(condition) for condition in where])
    keys = zip(*(found[name].to_pylist() for name in KEY), strict=True)
    kept = [(row["split"], row["step"], to_trajectory(row)) for row in run.rows_of(keys)]
    if best_of_group is not None:
        kept = _best(kept, count=best_of_group)
    return list(_trained_once(kept))


def _best(kept: Sequence[_Found], *, count: int) -> list[_Found]:
    """Return the scored trajectories with the highest rewards of each group; of equal ones, the first."""
    groups: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    for number, (split, step, trajectory) in enumerate(kept):
        if trajectory.reward is not None:
            groups[split, step, trajectory.group].append(number)
    best = {
        number
        for numbers in groups.values()
        for number in sorted(numbers, key=lambda number: -(kept[number][2].reward or 0.0))[:count]
    }
    return [each for number, each in enumerate(kept) if number in best]


def _trained_once(kept: Sequence[_Found]) -> Iterator[Sequence[Segment]]:
    """Yield the segments of each trajectory. Those that an earlier branch has are not sampled tokens in later ones."""
    earlier: defaultdict[tuple[str, int, int, int], list[Sequence[Segment]]] = defaultdict(list)
    for split, step, trajectory in kept:
        segments = trajectory.output.segments
        if trajectory.branch is None:
            yield segments
            continue
        branches = earlier[split, step, trajectory.group, trajectory.rollout]
        num_shared = max((_num_shared(segments, other) for other in branches), default=0)
        branches.append(segments)
        yield [*map(_untrained, segments[:num_shared]), *segments[num_shared:]]


def _num_shared(segments: Sequence[Segment], others: Sequence[Segment]) -> int:
    """Return the number of equal segments at the beginning."""
    equal = takewhile(
        lambda pair: np.array_equal(pair[0].token_ids, pair[1].token_ids), zip(segments, others, strict=False)
    )
    return len(list(equal))


def _untrained(segment: Segment) -> Segment:
    return Segment(segment.token_ids, Origin.PREFIX) if segment.origin is Origin.MODEL else segment
