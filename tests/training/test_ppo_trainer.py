"""Whole runs: they learn, stop with a checkpoint, and resume exactly."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from agent_loop.config import Config, load_config
from agent_loop.errors import CheckpointError, ConfigError, DataError, RolloutError
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import latest_checkpoint, list_checkpoints
from agent_loop.training.metrics import read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run import TrainResult
from agent_loop.types import Row
from tests.training.fakes import PAD, FakeRollouts, FakeTemplate, tiny_policy


def changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def train(config: Config, *, rollouts: FakeRollouts | None = None, **options: Any) -> TrainResult:
    trainer = PPOTrainer(
        config,
        manager=rollouts or FakeRollouts(tiny_policy()),
        console=options.pop("console", Console(file=io.StringIO())),
        **options,
    )
    return asyncio.run(trainer.fit())


def policy_of(result: TrainResult) -> dict[str, Tensor]:
    assert result.checkpoint is not None
    return AutoModelForCausalLM.from_pretrained(result.checkpoint / "model", dtype="float32").state_dict()


def assert_same_policy(first: TrainResult, second: TrainResult) -> None:
    expected = policy_of(first)
    assert all(torch.equal(value, expected[name]) for name, value in policy_of(second).items())


def test_a_run_raises_its_reward(config: Config) -> None:
    config = changed(config, "trainer", total_steps=25, save_every=None)

    result = train(config)

    rewards = [line[names.REWARD_MEAN] for line in read_metrics(result.run_dir / "metrics.jsonl")]
    assert len(rewards) == 25
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert not result.is_interrupted
    assert result.checkpoint is None


def test_each_step_publishes_its_weights_and_writes_one_line(config: Config) -> None:
    rollouts = FakeRollouts(tiny_policy())
    config = changed(config, "trainer", val_every=3, val_before_train=True)

    result = train(config, rollouts=rollouts)

    lines = {line["step"]: line for line in read_metrics(result.run_dir / "metrics.jsonl")}
    assert sorted(lines) == [0, 1, 2, 3, 4]
    assert [step for step, line in lines.items() if "val/pass@2" in line] == [0, 3, 4]
    assert rollouts.weight_version == 4
    assert lines[3][names.STALENESS_MAX] == 0
    differences = [line[names.LOGPROB_DIFF_MAX] for line in lines.values() if names.LOGPROB_DIFF_MAX in line]
    assert differences
    assert max(differences) < 1e-5
    assert {"timing_s/rollout", "timing_s/update", "timing_s/validate"} <= set(lines[3])
    assert result.evaluation is not None
    assert result.evaluation.num_trajectories == 6
    assert load_config(result.run_dir / "config.yaml") == config


def test_two_steps_and_two_more_after_a_resume_are_four_steps_bit_for_bit(
    config: Config, tmp_path: Path
) -> None:
    whole = train(config)
    half = changed(config, "trainer", total_steps=2, run_dir=str(tmp_path / "other"))
    train(half)
    rollouts = FakeRollouts(tiny_policy())

    resumed = train(changed(half, "trainer", total_steps=4), rollouts=rollouts, resume=True)

    assert resumed.step == 4
    assert_same_policy(whole, resumed)
    lines = [list(read_metrics(result.run_dir / "metrics.jsonl")) for result in (whole, resumed)]
    assert [line["step"] for line in lines[1]] == [1, 2, 3, 4]
    assert [line[names.REWARD_MEAN] for line in lines[0]] == [line[names.REWARD_MEAN] for line in lines[1]]
    assert len(rollouts.rows) == 2


@pytest.mark.parametrize("completed", [0, 1, 2])
def test_ctrl_c_in_a_rollout_writes_a_checkpoint_from_which_the_run_resumes(
    config: Config, tmp_path: Path, completed: int
) -> None:
    def interrupt(weight_version: int) -> None:
        if weight_version == completed:
            signal.raise_signal(signal.SIGINT)

    rollouts = FakeRollouts(tiny_policy(), on_run=interrupt, hangs_at=completed)
    output = io.StringIO()

    stopped = train(config, rollouts=rollouts, console=Console(file=output, width=400))

    assert rollouts.was_cancelled
    assert stopped.is_interrupted
    assert stopped.step == completed
    assert latest_checkpoint(stopped.run_dir).step == completed
    assert (
        f"stopped after step {completed}; resume to continue from {stopped.checkpoint}" in output.getvalue()
    )

    rest = FakeRollouts(tiny_policy())
    resumed = train(config, rollouts=rest, resume="auto")
    whole_rollouts = FakeRollouts(tiny_policy())
    whole = train(changed(config, "trainer", run_dir=str(tmp_path / "whole")), rollouts=whole_rollouts)

    assert rest.rows == whole_rollouts.rows[completed:]
    assert_same_policy(whole, resumed)


def test_ctrl_c_in_an_update_counts_the_step_and_publishes_nothing(config: Config) -> None:
    rollouts = FakeRollouts(tiny_policy())

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

    stopped = train(config, rollouts=rollouts)

    assert (stopped.step, stopped.is_interrupted) == (2, True)
    assert rollouts.weight_version == 1
    assert latest_checkpoint(stopped.run_dir).step == 2


def test_too_many_failures_stop_the_run_with_a_checkpoint(config: Config) -> None:
    def fail(weight_version: int) -> None:
        if weight_version == 3:
            raise RolloutError("16 of 16 trajectories failed")

    with pytest.raises(RolloutError, match="16 of 16"):
        train(config, rollouts=FakeRollouts(tiny_policy(), on_run=fail))

    assert latest_checkpoint(Path(config.trainer.run_dir)).step == 3


def test_a_new_run_does_not_write_into_the_folder_of_another(config: Config) -> None:
    first = train(config)

    with pytest.raises(
        ConfigError, match=r"holds a run already \(checkpoints and metrics.jsonl\); resume it"
    ):
        train(config)
    again = train(changed(config, "trainer", total_steps=2), overwrite=True)

    assert [line["step"] for line in read_metrics(first.run_dir / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in list_checkpoints(again.run_dir)] == ["step-000002"]
    with pytest.raises(ConfigError, match="resume and overwrite are both set"):
        train(config, overwrite=True, resume=True)


def test_resuming_from_an_earlier_checkpoint_needs_a_separate_folder(config: Config, tmp_path: Path) -> None:
    first = train(config)
    early = str(list_checkpoints(first.run_dir)[0])

    with pytest.raises(CheckpointError, match=r"after step 2, but .* later checkpoints \(step-000004\)"):
        train(config, resume=early)
    branch = train(changed(config, "trainer", run_dir=str(tmp_path / "branch")), resume=early)

    assert_same_policy(first, branch)


def test_a_resume_with_other_training_rows_is_refused_unless_it_is_allowed(
    config: Config, tmp_path: Path
) -> None:
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
    allowed = changed(config, "data", allow_changed_rows=True)
    resumed = train(allowed, resume=True, console=Console(file=output, width=400))

    assert resumed.step == 2
    assert "the rows of data.train_files changed since that checkpoint (added: " in output.getvalue()
    rows = latest_checkpoint(resumed.run_dir).rows["train"]
    assert [Path(name).name for name in rows.files] == ["0.jsonl", "1.jsonl"]


def test_a_step_without_signal_changes_no_weight_but_counts(config: Config) -> None:
    class Indifferent(FakeRollouts):
        async def run(self, *args: Any, **options: Any) -> Any:
            return [
                structs.replace(t, reward=1.0 if t.rollout else None)
                for t in await super().run(*args, **options)
            ]

    result = train(config, rollouts=Indifferent(tiny_policy()))

    assert result.metrics[names.SKIPPED_UPDATE] == 1
    assert result.metrics[names.SIGNAL_SHARE] == 0
    expected = tiny_policy().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in policy_of(result).items())


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

    rollouts = Strict(tiny_policy())
    with pytest.raises(DataError, match="row 3"):
        train(config, rollouts=rollouts)
    assert rollouts.rows == []
    assert rollouts.num_checked > config.data.train_batch_size
