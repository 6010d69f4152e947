"""Stored trajectories are trained on exactly the tokens that the model sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from agent_loop.config import SftConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import assemble
from agent_loop.storage import write_trajectories
from agent_loop.storage.vocabulary import write_vocabulary
from agent_loop.training.supervised.examples import Examples, load_examples
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import FORCED
from tests.helpers import hermes_template
from tests.storage.samples import failed, model, prompt, solved, tool
from tests.training.fakes import tiny_tokenizer


def loaded(tmp_path: Path, *trajectories: Trajectory, **config: Any) -> Examples:
    folder = tmp_path / "trajectories"
    write_trajectories(folder / "train-000001.parquet", list(trajectories), step=1, split="train")
    return load_examples([str(tmp_path)], config=SftConfig(**config), template=hermes_template())


def rows_of(examples: Examples) -> list[tuple[list[int], list[int]]]:
    """Return the response of each example and its trained tokens, as the trainer gets them."""
    batch = assemble(examples.trajectories, pad_token_id=0)
    width = batch["prompts"].shape[1]
    rows = []
    for response, mask, attention in zip(
        batch["responses"],
        batch["response_mask"].bool(),
        batch["attention_mask"][:, width:].bool(),
        strict=True,
    ):
        rows.append((response[attention].tolist(), response[mask].tolist()))
    return rows


def test_the_sampled_tokens_are_trained_and_no_others(tmp_path: Path) -> None:
    assert rows_of(loaded(tmp_path, solved())) == [([4, 5, 6, 7, 8, 9, 10], [4, 5, 9, 10])]


def test_tokens_that_a_grammar_forced_are_not_trained(tmp_path: Path) -> None:
    forced = structs.replace(model([4, 5, 9]), extras={FORCED: np.array([0, 1, 0], np.uint8)})
    output = AgentLoopOutput(segments=[prompt([1]), forced])
    trajectory = structs.replace(solved(), output=output)

    assert rows_of(loaded(tmp_path, trajectory)) == [([4, 5, 9], [4, 9])]


def test_conditions_select_trajectories(tmp_path: Path) -> None:
    examples = loaded(
        tmp_path, solved(reward=0.25), solved(rollout=1, reward=1.0), failed(), where="reward >= 1"
    )

    assert len(examples.trajectories) == 1


def test_the_best_of_each_group_are_kept(tmp_path: Path) -> None:
    def of(token: int, **place: Any) -> Trajectory:
        output = AgentLoopOutput(segments=[prompt([1]), model([token])])
        return structs.replace(solved(**place), output=output)

    examples = loaded(
        tmp_path,
        of(4, rollout=0, reward=0.5),
        of(5, rollout=1, reward=1.0),
        of(6, rollout=2, reward=1.0),
        of(7, group=1, rollout=0, reward=0.0),
        failed(),
        best_of_group=1,
    )

    assert [trained for _, trained in rows_of(examples)] == [[5], [7]]


def test_tokens_that_branches_share_are_trained_once(tmp_path: Path) -> None:
    def branch(number: int, *ids: int) -> Trajectory:
        output = AgentLoopOutput(segments=[prompt([1, 2]), model([3, 4]), tool([5]), model(list(ids))])
        return structs.replace(solved(reward=1.0), output=output, branch=number)

    examples = loaded(tmp_path, branch(0, 6), branch(1, 7), branch(2, 8))

    assert [trained for _, trained in rows_of(examples)] == [[3, 4, 6], [7], [8]]


def test_trajectories_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocabulary.json", tiny_tokenizer())

    with pytest.raises(DataError, match="another vocabulary than that of"):
        loaded(tmp_path, solved())
