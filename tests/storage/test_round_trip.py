"""Stored trajectories are read back, by this package and by other libraries."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from agent_loop.errors import DataError
from agent_loop.storage import Learned, StoredRun, to_trajectory, write_trajectories
from agent_loop.storage.columns import SCALARS
from agent_loop.training.metrics import FAILURES, RETRIES
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import (
    AgentLoopOutput,
    Failure,
    FailureKind,
    Incident,
    IncidentKind,
    Trajectory,
)
from tests.storage.samples import failed, solved, without_logprobs


def written(folder: Path, *trajectories: Trajectory, step: int = 12, **more: object) -> Path:
    path = folder / "trajectories" / f"train-{step:06d}.parquet"
    write_trajectories(path, trajectories, step=step, split="train", **more)
    return path


def assert_same(read: AgentLoopOutput, output: AgentLoopOutput) -> None:
    assert len(read.segments) == len(output.segments)
    for mine, its in zip(read.segments, output.segments, strict=True):
        assert mine.token_ids.tolist() == its.token_ids.tolist()
        assert (mine.origin, mine.weight_version) == (its.origin, its.weight_version)
        assert (mine.logprobs is None) == (its.logprobs is None)
        if its.logprobs is not None:
            assert mine.logprobs.tobytes() == its.logprobs.tobytes()
    for field in fields(AgentLoopOutput):
        if field.name not in ("segments", "failure"):
            assert getattr(read, field.name) == getattr(output, field.name), field.name


@pytest.mark.parametrize(
    "trajectory",
    [solved(), failed(), without_logprobs(), without_logprobs(some=True)],
    ids=["solved", "failed", "no log-probs", "some log-probs"],
)
def test_a_trajectory_is_read_back_unchanged(trajectory: Trajectory, tmp_path: Path) -> None:
    written(tmp_path, trajectory)
    row = StoredRun(tmp_path).trajectory("train", 12, trajectory.trajectory_id)
    read = to_trajectory(row)
    assert_same(read.output, trajectory.output)
    assert read.trajectory_id == trajectory.trajectory_id
    assert (read.reward, read.reward_extra) == (trajectory.reward, trajectory.reward_extra)
    assert read.trace is None or read.trace.spans == trajectory.trace.spans
    assert (read.trace is None) == (trajectory.trace is None)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_what_failed_a_trajectory_and_its_retries_are_stored(kind: FailureKind, tmp_path: Path) -> None:
    again = Incident(IncidentKind.RETRIED, "the trajectory ran again after Gone")
    failure = Failure("Gone", "Traceback ...", kind)
    lost = structs.replace(solved(), output=solved().output.noted(again).failed(failure), reward=None)
    written(tmp_path, lost)
    row = StoredRun(tmp_path).trajectory("train", 12, lost.trajectory_id)
    read = to_trajectory(row)
    assert row["failure_kind"] == str(kind)
    assert read.reward is None
    assert read.output.failure == failure
    assert read.output.incidents[-1] == again
    metrics = rollout_metrics([read], success_threshold=1.0, weight_version=0)
    assert (metrics[RETRIES], metrics[f"{FAILURES}{kind}"]) == (1, 1)


def test_an_unpaired_surrogate_becomes_a_replacement_character(tmp_path: Path) -> None:
    written(tmp_path, failed())
    read = to_trajectory(StoredRun(tmp_path).trajectory("train", 12, "group=0/rollout=1"))
    assert read.output.failure.error == "ValueError: half a surrogate \ufffd"
    assert read.row == {"raw_prompt": [{"role": "user", "content": "\ufffd"}], "weight": None}


def test_columns_have_the_values_of_the_trajectory(tmp_path: Path) -> None:
    learned = Learned(
        advantages=np.array([1, 1, 9, 9, 9, 1, 5], np.float32),
        train_logprobs=np.array([-0.1, -0.25, 0, 0, 0, -0.3, -0.5], np.float32),
    )
    written(tmp_path, solved(), failed(), learned=[learned, None], weight_version=5, success_threshold=0.1)
    table = StoredRun(tmp_path).scalars()
    assert table.column_names == list(SCALARS)
    first, second = table.to_pylist()
    assert (first["step"], first["split"], first["agent_name"]) == (12, "train", "tool_agent")
    assert (first["reward"], first["is_success"], first["stop_reason"]) == (0.1, True, "answered")
    assert (first["num_turns"], first["num_assistant_turns"], first["num_model_tokens"]) == (4, 2, 4)
    assert (first["prompt_length"], first["response_length"]) == (3, 7)
    assert (first["advantage"], first["staleness"]) == (2.0, 2)
    assert first["logprob_diff_max"] == pytest.approx(0.1)
    assert first["logprob_diff_mean"] == pytest.approx(0.15 / 4)
    assert (first["admission_s"], first["generate_s"], first["prefill_s"]) == (1.0, 3.5, 0.75)
    assert (first["tool_s"], first["other_s"], first["seconds"]) == (0.5, 1.0, 6.0)
    assert second["failure"].startswith("ValueError")
    assert [second[name] for name in ("reward", "seconds", "advantage", "staleness")] == [None] * 4


def test_images_are_described(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    asked = {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": "?"}]}
    base = solved()
    shown = Trajectory(
        output=AgentLoopOutput(segments=base.output.segments, messages=[asked]),
        row={"raw_prompt": [asked], "images": [pixels.repeat(100, 0)]},
        group=0,
        rollout=0,
        reward=0.0,
        reward_extra={},
    )
    row = StoredRun(written(tmp_path, shown)).trajectory("train", 12, "group=0/rollout=0")
    described = "an array of shape [4, 4, 3] and type uint8"
    assert json.loads(row["messages"])[0]["content"][0] == {"type": "image", "image": described}
    assert json.loads(row["row"])["raw_prompt"][0]["content"][0]["image"] == described
    assert json.loads(row["row"])["images"] == ["an array of shape [400, 4, 3] and type uint8"]


def test_a_run_is_read_by_step_and_split(tmp_path: Path) -> None:
    for step in (1, 2):
        written(tmp_path, *(solved(group=g, rollout=r) for g in range(40) for r in range(2)), step=step)
    val = tmp_path / "trajectories" / "val-000002.parquet"
    write_trajectories(val, [solved()], step=2, split="val")
    run = StoredRun(tmp_path)
    assert [(f.step, f.split, f.num_trajectories) for f in run.files()] == [
        (1, "train", 80),
        (2, "train", 80),
        (2, "val", 1),
    ]
    assert len(run.scalars()) == 161
    assert len(run.scalars(split="val")) == 1
    assert [row["trajectory_id"] for row in run.rows(step=2, trajectory_id="group=39/rollout=1")] == [
        "group=39/rollout=1"
    ]
    assert len(StoredRun(tmp_path / "trajectories").files()) == 3
    assert len(StoredRun(val).files()) == 1
    with pytest.raises(DataError, match=r"no trajectory 'group=99/rollout=0' of train step 1"):
        run.trajectory("train", 1, "group=99/rollout=0")


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no stored trajectories"):
        StoredRun(tmp_path)
    (tmp_path / "other.parquet").write_bytes(b"not Parquet")
    with pytest.raises(DataError, match="a Parquet file that is damaged or was cut off"):
        StoredRun(tmp_path).files()


def test_an_empty_step_is_a_file_without_rows(tmp_path: Path) -> None:
    run = StoredRun(written(tmp_path))
    assert run.scalars().num_rows == 0
    assert list(run.rows()) == []
