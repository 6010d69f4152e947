"""Whole runs: they learn, run ahead, select rows, stop with a checkpoint, and resume exactly."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from agent_loop.config import Config, load_config
from agent_loop.errors import CheckpointError, ConfigError, DataError, RolloutError
from agent_loop.storage import StoredRun
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import latest_checkpoint, list_checkpoints
from agent_loop.training.run import Interrupt, TrainResult
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.training.fakes import PAD, FakeRollouts, FakeTemplate
from tests.training.runs import assert_same_policy, changed, lines_of, train


def test_a_run_raises_its_reward(config: Config) -> None:
    result = train(changed(config, "trainer", total_steps=25, save_every=None))
    rewards = [line[names.REWARD_MEAN] for line in lines_of(result)]
    assert len(rewards) == 25
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert not result.is_interrupted
    assert result.checkpoint is None


def test_each_step_publishes_its_weights_and_writes_one_line(config: Config) -> None:
    rollouts = FakeRollouts()
    config = changed(config, "trainer", val_every=3, val_before_train=True)
    result = train(config, rollouts)
    lines = {line["step"]: line for line in lines_of(result)}
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert [step for step, line in lines.items() if "val/pass@2" in line] == [0, 3, 4]
    assert rollouts.weight_version == 4
    assert lines[3][names.STALENESS_MAX] == 0
    differences = [line[names.LOGPROB_DIFF_MAX] for line in lines.values() if names.LOGPROB_DIFF_MAX in line]
    assert 0 < max(differences) < 1e-5
    assert {"timing_s/rollout", "timing_s/update", "timing_s/validate"} <= set(lines[3])
    assert result.evaluation is not None
    assert result.evaluation.num_trajectories == 6
    assert load_config(result.run_dir / "config.yaml") == config


def test_each_step_is_stored_with_advantages_and_the_trainers_logprobs(config: Config) -> None:
    config = changed(config, "trainer", total_steps=2, val_every=1)
    run = StoredRun(train(changed(config, "actor", ppo_mini_batches=1)).run_dir)
    files = [(file.step, file.split, file.num_trajectories) for file in run.files()]
    assert files == [(1, "train", 16), (1, "val", 6), (2, "train", 16), (2, "val", 6)]
    rows = list(run.rows(split="train", step=2))
    trained = [row for row in rows if row["advantages"] is not None]
    assert trained
    by_group: dict[int, list[float]] = {}
    for row in trained:
        is_model = row["response_mask"] == 1
        assert np.abs(row["train_logprobs"] - row["response_logprobs"])[is_model].max() < 1e-5
        assert row["logprob_diff_max"] < 1e-5
        assert row["advantage"] == pytest.approx(row["advantages"][is_model].mean())
        by_group.setdefault(row["group"], []).append(row["advantage"])
    assert all(abs(sum(each)) < 1e-4 for each in by_group.values())
    assert {(row["weight_version"], row["staleness"]) for row in rows} == {(1, 0)}
    assert all(row["advantages"] is None for row in run.rows(split="val"))
    means = {line["step"]: line.get(names.REWARD_MEAN) for line in run.metrics()}
    assert means[2] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert run.vocabulary()[7] == "7"


def test_a_failed_write_is_counted_in_a_metric_and_the_run_continues(config: Config) -> None:
    run_dir = Path(config.trainer.run_dir)
    run_dir.mkdir()
    (run_dir / "trajectories").write_text("in the way", encoding="utf-8")
    result = train(changed(config, "trainer", total_steps=3, save_every=None))
    assert [line["step"] for line in lines_of(result)] == [1, 2, 3]
    assert lines_of(result)[-1][names.UNSTORED_FILES] >= 1


# -- interrupts and errors ---------------------------------------------------------------------------------------------


def test_the_first_sigint_cancels_the_call_and_the_second_raises_at_once() -> None:
    events: list[str] = []

    async def interrupted() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")

    async def scenario() -> None:
        interrupt = Interrupt()
        with interrupt.listening():
            assert await interrupt.unless_requested(interrupted()) is None
            assert await interrupt.unless_requested(asyncio.sleep(60)) is None
            assert interrupt.is_requested
            events.append("continued")
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scenario())
    assert events == ["cancelled", "continued"]


@pytest.mark.parametrize("completed", [0, 2])
def test_ctrl_c_in_a_rollout_writes_a_checkpoint_from_which_the_run_resumes_bit_for_bit(
    config: Config, tmp_path: Path, completed: int
) -> None:
    def interrupt(weight_version: int) -> None:
        if weight_version == completed:
            signal.raise_signal(signal.SIGINT)

    rollouts = FakeRollouts(on_run=interrupt, hangs_at=completed)
    output = io.StringIO()
    stopped = train(config, rollouts, output=output)
    assert rollouts.was_cancelled
    assert (stopped.step, stopped.is_interrupted) == (completed, True)
    assert latest_checkpoint(stopped.run_dir).step == completed
    note = f"stopped after step {completed}; resume to continue from {stopped.checkpoint}"
    assert note in output.getvalue()
    rest, whole_rollouts = FakeRollouts(), FakeRollouts()
    resumed = train(config, rest, resume="auto")
    whole = train(changed(config, "trainer", run_dir=str(tmp_path / "whole")), whole_rollouts)
    assert rest.rows == whole_rollouts.rows[completed:]
    assert_same_policy(whole, resumed)
    found, expected = ([line[names.REWARD_MEAN] for line in lines_of(each)] for each in (resumed, whole))
    assert found == expected


def test_ctrl_c_in_an_update_counts_the_step_and_publishes_nothing(config: Config) -> None:
    rollouts = FakeRollouts()

    class InterruptingTemplate(FakeTemplate):
        """Template that sends SIGINT when the thread of the update reads the pad token."""

        @property
        def pad_token_id(self) -> int:
            if rollouts.weight_version == 1:
                rollouts.loop.call_soon_threadsafe(signal.raise_signal, signal.SIGINT)
                for _ in range(5):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), rollouts.loop).result()
            return PAD

    rollouts.template = InterruptingTemplate()
    stopped = train(config, rollouts)
    assert (stopped.step, stopped.is_interrupted) == (2, True)
    assert rollouts.weight_version == 1
    assert latest_checkpoint(stopped.run_dir).step == 2


def test_too_many_failures_stop_the_run_with_a_checkpoint(config: Config) -> None:
    def fail(weight_version: int) -> None:
        if weight_version == 3:
            raise RolloutError("16 of 16 trajectories failed")

    with pytest.raises(RolloutError, match="16 of 16"):
        train(config, FakeRollouts(on_run=fail))
    assert latest_checkpoint(Path(config.trainer.run_dir)).step == 3


# -- folders and settings ----------------------------------------------------------------------------------------------


def test_a_new_run_does_not_write_into_the_folder_of_another(config: Config, tmp_path: Path) -> None:
    first = train(config)
    with pytest.raises(ConfigError, match=r"a run already \(checkpoints and metrics.jsonl\); resume it"):
        train(config)
    early = str(list_checkpoints(first.run_dir)[0])
    with pytest.raises(CheckpointError, match=r"after step 2, but .* later checkpoints \(step-000004\)"):
        train(config, resume=early)
    assert_same_policy(
        first, train(changed(config, "trainer", run_dir=str(tmp_path / "branch")), resume=early)
    )
    again = train(changed(config, "trainer", total_steps=2), overwrite=True)
    assert [line["step"] for line in lines_of(again)] == [1, 2]
    assert [path.name for path in list_checkpoints(again.run_dir)] == ["step-000002"]
    with pytest.raises(ConfigError, match="resume and overwrite are both set"):
        train(config, overwrite=True, resume=True)


def test_a_resumed_run_rewrites_the_files_after_the_checkpoint(config: Config) -> None:
    config = changed(config, "trainer", total_steps=3)
    run_dir = train(config).run_dir
    folder = run_dir / "trajectories"
    (run_dir / "checkpoints" / "step-000003").rename(run_dir / "gone")
    (folder / "train-000009.parquet").write_bytes(b"of a later step")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    train(config, resume=True)
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(after) == [f"train-{step:06d}.parquet" for step in (1, 2, 3)]
    assert [after[name] != before[name] for name in sorted(after)] == [False, False, True]


def test_a_resume_with_other_training_rows_is_refused_unless_allowed(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "0.jsonl").write_text("".join(f'{{"prompt": "{n} {n + 1}"}}\n' for n in range(2, 8)))
    config = changed(config, "data", train_files=[str(folder)])
    train(changed(config, "trainer", total_steps=1))
    (folder / "1.jsonl").write_text('{"prompt": "1 2"}\n')
    config = changed(config, "trainer", total_steps=2)
    output = io.StringIO()
    with pytest.raises(CheckpointError, match=r"step-000001' \(added: .*1.jsonl\); put the files back"):
        train(config, resume=True)
    resumed = train(changed(config, "data", allow_changed_rows=True), resume=True, output=output)
    assert resumed.step == 2
    assert "the rows of data.train_files changed since that checkpoint (added: " in output.getvalue()
    rows = latest_checkpoint(resumed.run_dir).rows["train"]
    assert [Path(name).name for name in rows.files] == ["0.jsonl", "1.jsonl"]


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"train_files": []}, "data.train_files is empty"),
        ("data", {"val_files": []}, "data.val_files is empty"),
        ("rollout", {"top_p": 0.9}, r"rollout.top_p is 0.9, .* biased; set rollout.top_p=1"),
        ("rollout", {"n": 1}, "rollout.n is 1, but algorithm.adv_estimator=grpo"),
        ("model", {"path": ""}, "model.path is not set"),
        ("model", {"path": "no/such/model"}, "model.path is 'no/such/model', which transformers cannot load"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_written(
    config: Config, section: str, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = changed(changed(config, "trainer", val_every=2), section, **values)
    with pytest.raises(ConfigError, match=message):
        train(config)
    assert not Path(config.trainer.run_dir).exists()


def test_every_row_is_checked_before_the_first_step(config: Config) -> None:
    class Strict(FakeRollouts):
        def check_rows(self, rows: Iterable[Row]) -> None:
            self.num_checked = len(list(rows))
            raise DataError("row 3: interaction_kwargs has no name")

    rollouts = Strict()
    with pytest.raises(DataError, match="row 3"):
        train(config, rollouts)
    assert rollouts.rows == []
    assert rollouts.num_checked > config.data.train_batch_size


# -- asynchronous runs -------------------------------------------------------------------------------------------------


class SlowRollouts(FakeRollouts):
    """Rollouts that take time. Tokens are sampled with the weights at their start."""

    num_running = most_running = 0

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            trajectories = await super().run(rows, **options)
            await asyncio.sleep(0.05)
        finally:
            self.num_running -= 1
        return trajectories


def test_max_staleness_of_zero_is_synchronous_training_bit_for_bit(config: Config, tmp_path: Path) -> None:
    sync_rollouts, async_rollouts = SlowRollouts(), SlowRollouts()
    synchronous = train(config, sync_rollouts)
    settings = {"run_dir": str(tmp_path / "async"), "mode": "async", "max_staleness": 0}
    asynchronous = train(changed(config, "trainer", **settings), async_rollouts)
    assert async_rollouts.by_label == sync_rollouts.by_label
    assert async_rollouts.most_running == 1
    assert_same_policy(synchronous, asynchronous)

    def untimed(result: TrainResult) -> list[dict[str, Any]]:
        timed = ("timing_s/", "time/", "perf/")
        return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines_of(result)]

    assert untimed(asynchronous) == untimed(synchronous)


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_every_row_is_trained_once_and_no_token_is_older_than_max_staleness(
    config: Config, tmp_path: Path, max_staleness: int
) -> None:
    rollouts, reference = SlowRollouts(), SlowRollouts()
    config = changed(config, "trainer", total_steps=8)
    result = train(
        changed(config, "trainer", mode="async", max_staleness=max_staleness, val_every=3), rollouts
    )
    train(changed(config, "trainer", run_dir=str(tmp_path / "sync")), reference)
    lines = lines_of(result)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sorted(rollouts.by_label) == [f"step={step}" for step in range(1, 9)]
    assert rollouts.by_label == reference.by_label
    staleness = [line[names.STALENESS_MAX] for line in lines]
    assert all(steps <= min(number, max_staleness) for number, steps in enumerate(staleness))
    assert max(staleness) == max_staleness  # Not at each step: a rollout may start late on a busy machine.
    assert all(line[names.STALENESS_MEAN] <= line[names.STALENESS_MAX] for line in lines)
    assert 1 < rollouts.most_running <= max_staleness + 2  # A validation may run at the same time.
    assert rollouts.num_running == 0


def test_ctrl_c_ends_all_rollouts_and_the_run_can_be_resumed(config: Config) -> None:
    class Interrupted(SlowRollouts):
        async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
            if options["label"] == "step=5":
                signal.raise_signal(signal.SIGINT)
            return await super().run(rows, **options)

    config = changed(config, "trainer", mode="async", max_staleness=2, total_steps=6)
    rollouts, rest = Interrupted(), SlowRollouts()
    stopped = train(config, rollouts)
    assert stopped.is_interrupted
    assert rollouts.num_running == 0
    assert latest_checkpoint(stopped.run_dir).step == stopped.step
    resumed = train(config, rest, resume="auto")
    assert sorted(rest.by_label) == [f"step={step}" for step in range(stopped.step + 1, 7)]
    assert [line["step"] for line in lines_of(resumed)] == list(range(1, 7))


# -- rows --------------------------------------------------------------------------------------------------------------


def word_of(row: Row) -> int:
    """Return the first word of the prompt, which differs between rows."""
    return int(row["raw_prompt"][0]["content"].split()[0])


def test_groups_without_variance_are_replaced_by_other_rows(config: Config) -> None:
    def reward_even_rows_alike(trajectory: Trajectory, step: int) -> Trajectory:
        return structs.replace(
            trajectory, reward=float(trajectory.rollout % 2) if word_of(trajectory.row) % 2 else 1.0
        )

    rollouts = FakeRollouts(edit=reward_even_rows_alike)
    result = train(changed(config, "algorithm", max_refills=4), rollouts)
    for line in lines_of(result):
        assert line[names.SIGNAL_SHARE] == 1.0
        assert line[names.ROWS_TRAINED] == 16
        of_labels = [
            [word_of(row) for row in rows]
            for label, rows in rollouts.by_label.items()
            if label.split("/")[0] == f"step={line['step']}"
        ]
        words = [word for rows in of_labels for word in rows]
        assert len(set(words[4:]) - set(words[:4])) == len(words[4:])
        assert line[names.DROPPED_GROUPS] == sum(word % 2 == 0 for word in words)
    assert len(rollouts.by_label) > 4


def some_rows_vary(trajectory: Trajectory, step: int) -> Trajectory:
    """Let the first rows always fail and the last rows always succeed."""
    row = word_of(trajectory.row)
    reward = 0.0 if row < 6 else 1.0 if row > 9 else float(trajectory.rollout % 2)
    return structs.replace(trajectory, reward=reward)


def with_sampler(config: Config, sampler: dict[str, Any], **trainer: Any) -> Config:
    values = config.model_dump()
    values["data"]["sampler"] = sampler
    values["trainer"] |= trainer
    return Config.model_validate(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [
        {"name": "curriculum", "floor": 0.1},
        {"name": "curriculum", "skip_failed": 1, "skip_solved": 1, "skip_for": 2},
        {"name": "uniform", "replay_share": 0.5, "replay_max_age": 3},
    ],
)
def test_a_resumed_run_has_the_rows_and_weights_of_a_run_that_never_stopped(
    config: Config, tmp_path: Path, sampler: dict[str, Any]
) -> None:
    rollouts, first, rest = (FakeRollouts(edit=some_rows_vary) for _ in range(3))
    whole = train(with_sampler(config, sampler), rollouts)
    half = with_sampler(config, sampler, run_dir=str(tmp_path / "half"), total_steps=2, save_every=1)
    train(half, first)
    resumed = train(changed(half, "trainer", total_steps=4), rest, resume=True)
    assert first.by_label | rest.by_label == rollouts.by_label
    assert_same_policy(whole, resumed)
    own = (names.ROWS_SEEN, names.ROWS_SUCCESS, names.ROWS_SKIPPED_SHARE, names.REPLAYED_TOKENS)
    found, expected = ([[line.get(n) for n in own] for line in lines_of(each)] for each in (resumed, whole))
    assert found == expected


def test_replayed_groups_are_trained_and_counted_and_are_no_rollouts(config: Config) -> None:
    rollouts = FakeRollouts(edit=some_rows_vary)
    sampler = {"replay_share": 0.5, "replay_max_age": 2}
    lines = lines_of(train(with_sampler(config, sampler, total_steps=8), rollouts))
    replayed = [int(line.get(names.REPLAYED_GROUPS, 0)) for line in lines]
    assert replayed[0] == 0
    assert sum(replayed) > 3
    for line, rows, num_replayed in zip(lines, rollouts.rows, replayed, strict=True):
        assert len(rows) == 4 - num_replayed
        counted, num_groups = (
            (names.REPLAYED_TOKENS, num_replayed) if num_replayed else (names.MODEL_TOKENS, len(rows))
        )
        assert line[counted] == 4 * 5 * num_groups
        assert line.get(names.REPLAYED_AGE_MAX, 0) <= 2
        assert line[names.STALENESS_MAX] == 0
    trained = [line[names.ROWS_TRAINED] for line in lines if line.get(names.REPLAYED_GROUPS) == 2]
    assert all(num_rows >= 8 for num_rows in trained)
