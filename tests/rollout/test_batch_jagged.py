"""Conversion of trajectories to jagged tensors, without padding, and back."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given

from agent_loop.rollout.batch import assemble, assemble_jagged
from agent_loop.trajectory import Trajectory
from agent_loop.types import Origin
from tests.harness import examples
from tests.rollout.test_batch import PAD, trajectories, trajectory

TOKEN_COLUMNS = ("input_ids", "position_ids", "response_mask", "weight_versions", "rollout_log_probs")


@examples(60)
@given(rows=trajectories.filter(bool))
def test_each_row_equals_the_row_of_the_padded_batch_without_padding(rows: list[Trajectory]) -> None:
    jagged, padded = assemble_jagged(rows), assemble(rows, pad_token_id=PAD)

    for number, (expected, row) in enumerate(zip(rows, padded, strict=True)):
        length = len(expected.output.prompt_ids) + len(expected.output.response_ids)
        attended = row["attention_mask"].bool()
        for name in TOKEN_COLUMNS:
            assert len(jagged[name].unbind()[number]) == length
        for name in ("input_ids", "position_ids"):
            assert torch.equal(jagged[name].unbind()[number], row[name][attended])
        for name in ("response_mask", "weight_versions", "rollout_log_probs"):
            start = len(expected.output.prompt_ids)
            assert torch.equal(jagged[name].unbind()[number][start:], row[name][: length - start])
        assert (jagged["response_mask"].unbind()[number][:start] == 0).all()
        assert (jagged["prompt_length"][number], jagged["response_length"][number]) == (start, length - start)
    for name in ("reward", "group", "rollout", "branch", "num_turns", "is_scored"):
        assert torch.equal(jagged[name].nan_to_num(), padded[name].nan_to_num())
    assert list(jagged["trajectory_id"]) == list(padded["trajectory_id"])


def test_columns_share_offsets_from_zero_to_the_number_of_tokens() -> None:
    batch = assemble_jagged([trajectory(response=[(Origin.MODEL, [4, 5])]), trajectory(rollout=1)])

    offsets = batch["input_ids"].offsets()
    assert offsets.tolist() == [0, 5, 8]
    assert batch["input_ids"].values().tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    for name in TOKEN_COLUMNS:
        assert batch[name].offsets() is offsets


def test_an_extra_field_with_the_name_of_a_column_gets_a_prefix() -> None:
    batch = assemble_jagged([trajectory(reward_extra={"prompt_length": 7, "accuracy": 0.5})])

    assert batch["prompt_length"].tolist() == [3]
    assert list(batch["reward_extra.prompt_length"]) == [7]
    assert list(batch["accuracy"]) == [0.5]


def test_tensors_share_the_memory_of_the_arrays() -> None:
    """Check that tensors are views of the numpy arrays."""
    batch = assemble([trajectory(response=[(Origin.MODEL, [4, 5])])], pad_token_id=PAD)

    view = np.asarray(batch["input_ids"])
    view[0, 0] = 77
    assert batch["input_ids"][0, 0] == 77
