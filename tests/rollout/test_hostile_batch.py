"""A batch of hostile and harmless rows ends with a reason for every row, leaks nothing, and can be trained on."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_loop.config import Config, MultiTurnConfig
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.jobs import Job
from agent_loop.runtime.isolated_task import num_abandoned
from agent_loop.storage.json_lines import write_lines
from agent_loop.storage.writer import write_trajectories
from agent_loop.testing import run_virtual
from agent_loop.training import metrics as names
from agent_loop.training.learner import load_learner
from agent_loop.trajectory import IncidentKind, Trajectory
from agent_loop.types import Row
from tests.harness import is_nightly
from tests.helpers import hermes_template, small_tokenizer
from tests.rollout import hostile
from tests.rollout.harness import WorkerHarness
from tests.rollout.hostile import HostileInteraction, Kind, Released, harmless_row, json_lines

NUM_HOSTILE = 1000 if is_nightly() else 200
NUM_HARMLESS = NUM_HOSTILE // 5
GROUP = 6
LONG_S = 4000.0
"""Time after which all released code has ended."""
KINDS = hostile.kinds()


@pytest.fixture(autouse=True)
def released() -> Iterator[Released]:
    released = Released()
    hostile.RELEASED.append(released)
    yield released
    hostile.RELEASED.clear()
    released.set()


def make_harness() -> WorkerHarness:
    return WorkerHarness(
        hostile.script,
        tools=hostile.hostile_tools(),
        interactions={"hostile": HostileInteraction()},
        reward=RewardFunction(hostile.async_reward, timeout_s=10.0),
        multi_turn=MultiTurnConfig(tool_timeout_s=10, interaction_timeout_s=10, close_timeout_s=5),
        deadline_s=100.0,
        request_timeout_s=20.0,
        vocab_size=len(small_tokenizer()),
        silence_s=1e6,
        response_length=400,
        prompt_length=400,
    )


def run(rows: Sequence[Row], released: Released) -> tuple[list[Trajectory], int]:
    """Run rows in groups, and check that nothing is left of them after all hanging code is released.

    Returns:
        The trajectories in the order of the rows, and the number of abandoned tasks.
    """
    jobs = [Job(row, n // GROUP, n % GROUP, {"temperature": 1.0}) for n, row in enumerate(rows)]

    async def scenario() -> tuple[list[Trajectory], int]:
        harness = make_harness()
        trajectories = await harness.worker.run(jobs)
        num_left = num_abandoned()
        released.set()
        await asyncio.sleep(LONG_S)
        assert num_abandoned() == 0
        harness.assert_nothing_is_left()
        return trajectories, num_left

    trajectories, num_left = run_virtual(scenario())
    threads = [thread for thread in threading.enumerate() if thread.name == "agent-loop-thread"]
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return trajectories, num_left


def ended(trajectory: Trajectory) -> str:
    """Return the stop reason, and the type of the failure if there is one."""
    output = trajectory.output
    if output.failure is None:
        return str(output.stop_reason)
    return f"{output.stop_reason} {output.failure.error.partition(':')[0]}"


def facts(trajectory: Trajectory) -> list[Any]:
    """Return the values that must not depend on other rows."""
    output = trajectory.output
    assert output.response_logprobs is not None
    return [
        output.prompt_ids.tolist(),
        output.response_ids.tolist(),
        output.response_mask.tolist(),
        output.response_logprobs.tolist(),
        output.weight_versions.tolist(),
        output.messages,
        output.stop_reason,
        output.feedback,
        output.incidents,
        trajectory.reward,
        trajectory.reward_extra,
    ]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def settings(folder: Path) -> Config:
    torch.manual_seed(0)
    model = Qwen3Config(
        vocab_size=len(small_tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(model).save_pretrained(folder)
    return Config.model_validate(
        {
            "model": {"path": str(folder), "device": "cpu"},
            "actor": {"lr": 1e-3},
            "algorithm": {"drop_zero_variance_groups": False},
        }
    )


def test_there_are_at_least_forty_kinds_of_hostile_components() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 40


def test_hundreds_of_hostile_rows_end_with_a_reason_leak_nothing_and_do_not_change_other_rows(
    released: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    config = settings(tmp_path / "policy")
    harmless = [harmless_row(number) for number in range(NUM_HARMLESS)]
    alone, _ = run(harmless, Released())
    num_files = open_files()

    rows: list[Row] = []
    kinds: list[Kind | None] = []
    for number in range(NUM_HOSTILE):
        kinds.append(KINDS[number % len(KINDS)])
        rows.append(KINDS[number % len(KINDS)].row(number))
        if number % 5 == 0:
            kinds.append(None)
            rows.append(harmless[number // 5])
    trajectories, num_left = run(rows, released)

    first_of = {t.group * GROUP + t.rollout: t for t in trajectories if not t.branch}
    assert sorted(first_of) == list(range(len(rows)))
    wrong = {
        kind.name: (ended(first_of[n]), first_of[n].output.failure)
        for n, kind in enumerate(kinds)
        if kind is not None and ended(first_of[n]) not in kind.ends
    }
    assert wrong == {}
    abandoned = {
        n: Counter(i.kind for i in t.output.incidents)[IncidentKind.ABANDONED] for n, t in first_of.items()
    }
    assert abandoned == {n: 0 if kind is None else kind.num_abandoned for n, kind in enumerate(kinds)}
    assert num_left == sum(abandoned.values()) > 0
    together = [first_of[n] for n, kind in enumerate(kinds) if kind is None]
    assert list(map(facts, together)) == list(map(facts, alone))
    assert open_files() == num_files
    assert list((tmp_path / "temp").iterdir()) == []

    write_lines(tmp_path / "records.jsonl", trajectories, split="rollout")
    records = json_lines((tmp_path / "records.jsonl").read_text(encoding="utf-8"))
    assert [record["trajectory_id"] for record in records] == [t.trajectory_id for t in trajectories]
    write_trajectories(tmp_path / "step.parquet", trajectories, step=1, split="train")
    assert pickle.loads(pickle.dumps([t.output for t in trajectories]))[0].stop_reason

    batch = assemble(trajectories, pad_token_id=hermes_template().pad_token_id)
    learner = load_learner(config)
    before = {name: value.clone() for name, value in learner.weights()}
    metrics = learner.learn(batch)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics[names.ROWS_TRAINED] > NUM_HARMLESS
    after = dict(learner.weights())
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert not all(torch.equal(value, after[name]) for name, value in before.items())
