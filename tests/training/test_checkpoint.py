"""Checkpoints are whole, loadable by others, and refused when damaged."""

from __future__ import annotations

import dataclasses
import json
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
        weight_version=step,
        learner=make_learner(step),
        tokenizer=tiny_tokenizer(),
        config={"actor": {"lr": 1.0}},
        keep=keep,
    )
    return open_checkpoint(path)


def test_a_checkpoint_is_a_model_folder_and_a_state(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=40)

    assert checkpoint.path == tmp_path / "checkpoints" / "step-000040"
    assert (checkpoint.step, checkpoint.weight_version) == (40, 40)
    assert checkpoint.config == {"actor": {"lr": 1.0}}
    model = AutoModelForCausalLM.from_pretrained(checkpoint.model_path, dtype="float32")
    expected = tiny_policy(seed=40).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(checkpoint.model_path).get_vocab()["7"] == 7
    make_learner(0).load(checkpoint)


def test_the_last_ones_are_kept_and_the_latest_is_found_by_number(tmp_path: Path) -> None:
    for step in (2, 999_999, 1_000_000):
        save(tmp_path, step=step)

    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]
    assert latest_checkpoint(tmp_path).step == 1_000_000


def test_what_was_left_half_written_is_no_checkpoint_and_is_swept_up(tmp_path: Path) -> None:
    torn = checkpoints_folder(tmp_path) / ".step-000007.tmp"
    torn.mkdir(parents=True)
    (torn / "half").write_text("half")
    with pytest.raises(CheckpointError, match="holds no checkpoint; start without resume"):
        latest_checkpoint(tmp_path)

    save(tmp_path, step=3)

    assert not torn.exists()
    assert latest_checkpoint(tmp_path).step == 3


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step-000001' does not exist"):
        open_checkpoint(tmp_path / "step-000001")


@pytest.mark.parametrize("name", ["trainer/.metadata", "model/model.safetensors", "model/config.json"])
def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path, step=1)
    file = checkpoint.path / name
    whole = file.read_bytes()

    file.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} has {len(whole) - 10} bytes instead of"):
        latest_checkpoint(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} is missing; remove it and resume"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", '{"step": 1', "{}", '{"files": 3}', "[]"])
def test_a_damaged_state_is_refused(tmp_path: Path, text: str) -> None:
    checkpoint = save(tmp_path, step=1)
    (checkpoint.path / "state.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"is damaged: state.json cannot be read"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_trainer_state_that_is_not_what_it_was_is_refused(tmp_path: Path, name: str) -> None:
    checkpoint = save(tmp_path, step=1)
    file = checkpoint.path / "trainer" / name
    file.write_bytes(b"x" * file.stat().st_size)

    with pytest.raises(CheckpointError, match=r"is damaged: trainer cannot be read"):
        make_learner(1).load(checkpoint)


def test_a_state_lacks_what_was_not_saved(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=1)
    save_state({"one": torch.ones(3)}, tmp_path)
    elsewhere = dataclasses.replace(checkpoint, path=tmp_path)
    one = {"one": torch.zeros(3)}

    load_state(one, elsewhere)

    assert one["one"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"cannot be read .*other"):
        load_state({"other": torch.zeros(3)}, elsewhere)


def test_the_state_lists_the_size_of_every_other_file(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=1)

    state = json.loads((checkpoint.path / "state.json").read_text())

    assert {"trainer/.metadata", "model/model.safetensors", "model/config.json"} <= set(state["files"])
    assert state["config_digest"] == checkpoint.config_digest
