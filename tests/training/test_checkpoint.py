"""Checkpoints are complete, other libraries can load them, and damaged checkpoints are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_loop.config import Config
from agent_loop.errors import CheckpointError
from agent_loop.training.actor import Actor
from agent_loop.training.checkpoint import (
    Checkpoint,
    checkpoints_folder,
    latest_checkpoint,
    list_checkpoints,
    load_state,
    open_checkpoint,
    save_checkpoint,
    save_state,
)
from agent_loop.training.learner import Learner
from tests.training.fakes import tiny_policy, tiny_tokenizer


def make_learner(seed: int) -> Learner:
    return Learner(Config(), actor=Actor(tiny_policy(seed=seed), config=Config().actor))


def save(run_dir: Path, *, step: int, keep: int = 2) -> Checkpoint:
    path = save_checkpoint(
        run_dir,
        step=step,
        learner=make_learner(step),
        tokenizer=tiny_tokenizer(),
        config={"actor": {"lr": 1.0}},
        keep=keep,
    )
    return open_checkpoint(path)


def test_a_checkpoint_is_a_model_folder_and_a_state(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=40)

    assert checkpoint.path == tmp_path / "checkpoints" / "step-000040"
    assert checkpoint.step == 40
    assert checkpoint.config == {"actor": {"lr": 1.0}}
    model = AutoModelForCausalLM.from_pretrained(checkpoint.model_path, dtype="float32")
    expected = tiny_policy(seed=40).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(checkpoint.model_path).get_vocab()["7"] == 7
    make_learner(0).load(checkpoint)


def test_the_last_checkpoints_are_kept_and_the_latest_is_found_by_number(tmp_path: Path) -> None:
    for step in (2, 999_999, 1_000_000):
        save(tmp_path, step=step)

    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]
    assert latest_checkpoint(tmp_path).step == 1_000_000


def test_a_partially_written_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    torn = checkpoints_folder(tmp_path) / ".step-000007.tmp"
    torn.mkdir(parents=True)
    (torn / "half").write_text("half")
    with pytest.raises(CheckpointError, match="holds no checkpoint; start without resume"):
        latest_checkpoint(tmp_path)

    save(tmp_path, step=3)

    assert not torn.exists()
    assert latest_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize("name", ["trainer/.metadata", "model/model.safetensors", "model/config.json"])
def test_a_truncated_or_missing_file_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path, step=1)
    file = checkpoint.path / name
    whole = file.read_bytes()

    file.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} has {len(whole) - 10} bytes instead of"):
        latest_checkpoint(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} is missing; copy it again"):
        latest_checkpoint(tmp_path)


def test_loading_a_part_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=1)
    save_state({"one": torch.ones(3)}, tmp_path)
    elsewhere = dataclasses.replace(checkpoint, path=tmp_path)
    one = {"one": torch.zeros(3)}

    load_state(one, elsewhere)

    assert one["one"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"cannot be read .*other"):
        load_state({"other": torch.zeros(3)}, elsewhere)


def every_file(checkpoint: Checkpoint) -> list[Path]:
    return sorted(path for path in checkpoint.path.rglob("*") if path.is_file())


def test_one_changed_bit_in_any_file_is_detected_and_the_previous_checkpoint_is_named(tmp_path: Path) -> None:
    earlier, checkpoint = save(tmp_path, step=1), save(tmp_path, step=2)
    assert len(every_file(checkpoint)) > 5
    for file in every_file(checkpoint):
        if file.name == "state.json":
            continue
        whole = file.read_bytes()
        for index in {0, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
            name = file.relative_to(checkpoint.path).as_posix()
            with pytest.raises(CheckpointError, match=rf"is damaged: {name} ") as refused:
                latest_checkpoint(tmp_path)
            assert f"resume, which takes the checkpoint before it, {str(earlier.path)!r}" in str(
                refused.value
            )
        file.write_bytes(whole)
    assert latest_checkpoint(tmp_path).step == 2


def test_an_additional_file_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=1)
    (checkpoint.path / "notes.txt").write_text("mine")
    assert latest_checkpoint(tmp_path).step == 1
    (checkpoint.path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model/adapter_config.json was not written with it"):
        latest_checkpoint(tmp_path)


def test_only_the_model_is_verified_if_only_the_model_is_read(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=1)
    (checkpoint.path / "trainer" / ".metadata").unlink()
    assert latest_checkpoint(tmp_path, parts=["model"]).step == 1
    with pytest.raises(CheckpointError, match="is missing"):
        latest_checkpoint(tmp_path)


class LearnerOnFullDisk:
    """Learner whose disk is full when it writes one of its files."""

    def __init__(self, name: str) -> None:
        self._name = name

    def save(self, folder: Path) -> None:
        full = folder / self._name
        full.parent.mkdir(parents=True, exist_ok=True)
        full.symlink_to("/dev/full")
        make_learner(1).save(folder)
        full.write_bytes(b"what no library writes")


@pytest.mark.parametrize("name", ["model/config.json", "trainer/__0_0.distcp", "other"])
def test_a_full_disk_is_an_error_and_the_previous_checkpoint_is_intact(tmp_path: Path, name: str) -> None:
    earlier = save(tmp_path, step=1, keep=1)
    with pytest.raises(CheckpointError) as refused:
        save_checkpoint(
            tmp_path,
            step=2,
            learner=LearnerOnFullDisk(name),
            tokenizer=tiny_tokenizer(),
            config={},
            keep=1,
        )
    assert "step-000002' cannot be written" in str(refused.value)
    assert f"the last one is {str(earlier.path)!r}, unchanged" in str(refused.value)
    assert [path.name for path in checkpoints_folder(tmp_path).iterdir()] == ["step-000001"]
    assert latest_checkpoint(tmp_path) == earlier
