"""Checkpoints are complete and verified, other libraries can load them, and a resume compares the rows."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import Config
from agent_loop.errors import CheckpointError, ConfigError
from agent_loop.rollout.rows import load_row_files
from agent_loop.training.actor import Actor
from agent_loop.training.checkpoint import (
    Checkpoint,
    checkpoints_folder,
    latest_checkpoint,
    list_checkpoints,
    load_state,
    named_checkpoint,
    open_checkpoint,
    save_checkpoint,
    save_state,
)
from agent_loop.training.export import export_model
from agent_loop.training.learner import Learner, load_learner
from agent_loop.training.manifest import DataManifest
from agent_loop.training.run import check_rows_unchanged
from tests.training.fakes import sampled_batch, tiny_policy, tiny_tokenizer


def make_learner(seed: int) -> Learner:
    return Learner(Config(), actor=Actor(tiny_policy(seed=seed), config=Config().actor))


def save(run_dir: Path, *, step: int, keep: int = 2, learner: Any = None, **config: Any) -> Checkpoint:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    learner = learner or make_learner(step)
    return open_checkpoint(
        save_checkpoint(run_dir, step=step, learner=learner, tokenizer=tokenizer, config=config, keep=keep)
    )


def loaded(folder: Path, dtype: str = "auto") -> dict[str, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()


def test_a_checkpoint_is_a_model_folder_and_a_state(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=40, actor={"lr": 1.0})
    assert checkpoint.path == tmp_path / "checkpoints" / "step-000040"
    assert (checkpoint.step, checkpoint.config) == (40, {"actor": {"lr": 1.0}})
    expected = tiny_policy(seed=40).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded(checkpoint.model_path).items())
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


def test_a_truncated_or_missing_file_is_named_if_its_part_is_read(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=1)
    for name in ("model/config.json", "trainer/.metadata"):
        file = checkpoint.path / name
        whole = file.read_bytes()
        file.write_bytes(whole[:-10])
        with pytest.raises(CheckpointError, match=rf": {name} has {len(whole) - 10} bytes instead of"):
            latest_checkpoint(tmp_path)
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"is damaged: {name} is missing; copy it again"):
            latest_checkpoint(tmp_path)
        if name.startswith("model/"):
            file.write_bytes(whole)
    assert latest_checkpoint(tmp_path, parts=["model"]).step == 1


def test_one_changed_bit_in_any_file_is_detected_and_the_previous_checkpoint_is_named(tmp_path: Path) -> None:
    earlier, checkpoint = save(tmp_path, step=1), save(tmp_path, step=2)
    files = [path for path in checkpoint.path.rglob("*") if path.is_file() and path.name != "state.json"]
    assert len(files) > 4
    for file in files:
        name, whole = file.relative_to(checkpoint.path).as_posix(), file.read_bytes()
        for index in {0, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
            with pytest.raises(CheckpointError, match=rf"is damaged: {name} ") as refused:
                latest_checkpoint(tmp_path)
            assert f"the checkpoint before it, {str(earlier.path)!r}" in str(refused.value)
        file.write_bytes(whole)
    assert latest_checkpoint(tmp_path).step == 2


def test_an_additional_file_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, step=1)
    (checkpoint.path / "notes.txt").write_text("mine")
    assert latest_checkpoint(tmp_path).step == 1
    (checkpoint.path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model/adapter_config.json was not written with it"):
        latest_checkpoint(tmp_path)


def test_loading_a_part_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    save_state({"one": torch.ones(3)}, tmp_path)
    checkpoint = Checkpoint(path=tmp_path, step=1, config={})
    one = {"one": torch.zeros(3)}
    load_state(one, checkpoint)
    assert one["one"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"cannot be read .*other"):
        load_state({"other": torch.zeros(3)}, checkpoint)


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
    with pytest.raises(CheckpointError, match=r"step-000002' cannot be written") as refused:
        save(tmp_path, step=2, keep=1, learner=LearnerOnFullDisk(name))
    assert f"the last one is {str(earlier.path)!r}, unchanged" in str(refused.value)
    assert [path.name for path in checkpoints_folder(tmp_path).iterdir()] == ["step-000001"]
    assert latest_checkpoint(tmp_path) == earlier


def trained(folder: Path, **model: Any) -> tuple[Learner, Checkpoint]:
    """Return a learner after two steps, with its checkpoint."""
    tiny_policy().save_pretrained(folder / "base")
    settings = {"path": str(folder / "base"), "device": "cpu", **model}
    config = Config.model_validate({"model": settings, "actor": {"lr": 1e-2}})
    learner = load_learner(config)
    for _ in range(2):  # The first step changes only one of the two matrices of an adapter.
        learner.learn(sampled_batch())
    save(folder / "run", step=1, learner=learner, **config.model_dump(mode="json"))
    return learner, named_checkpoint(folder / "run")


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}], ids=["whole", "lora"])
def test_an_export_has_the_weights_that_servers_got(tmp_path: Path, model: dict[str, Any]) -> None:
    learner, checkpoint = trained(tmp_path, **model)
    export_model(checkpoint, tmp_path / "out")
    found, moved = loaded(tmp_path / "out"), 0
    for name, value in learner.weights():
        torch.testing.assert_close(found[name], value)
        moved += not torch.equal(value, tiny_policy().get_parameter(name))
    assert moved
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_weights_have_the_requested_dtype_or_the_training_dtype(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path, dtype="bfloat16")
    export_model(checkpoint, tmp_path / "trained")
    export_model(checkpoint, tmp_path / "full", dtype="float32")
    assert {value.dtype for value in loaded(tmp_path / "trained").values()} == {torch.bfloat16}
    full = loaded(tmp_path / "full")
    assert {value.dtype for value in full.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in full.values())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_the_command_writes_adapters_in_the_format_of_peft(tmp_path: Path) -> None:
    learner, _ = trained(tmp_path, lora_rank=4)
    command = ["export", str(tmp_path / "run"), "--out", str(tmp_path / "adapter"), "--keep-adapter"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "step 1 is in" in result.output
    adapted = PeftModel.from_pretrained(tiny_policy(), str(tmp_path / "adapter")).merge_and_unload()
    for name, value in learner.weights():
        torch.testing.assert_close(adapted.get_parameter(name), value)


def test_exports_that_cannot_work_are_refused(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path)
    other = {**checkpoint.config, "model": {"path": str(tmp_path / "nowhere")}}
    with pytest.raises(ConfigError, match="exists already; give a folder that does not exist"):
        export_model(checkpoint, tmp_path / "base")
    with pytest.raises(ConfigError, match="holds a whole model and no adapters"):
        export_model(checkpoint, tmp_path / "out", keep_adapter=True)
    (checkpoint.model_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="nowhere', which cannot be loaded"):
        export_model(dataclasses.replace(checkpoint, config=other), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two files of rows."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in "ab":
        rows = [{"prompt": f"{name} {number}"} for number in range(5)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def manifest(*sources: str) -> DataManifest:
    return DataManifest.of(load_row_files(sources or ["shards"], prompt_key="prompt"))


def add(folder: Path, names: str) -> None:
    for name in names:
        (folder / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n')


def change_a_byte(folder: Path) -> None:
    path = folder / "b.jsonl"
    path.write_text(path.read_text().replace("b 3", "b 4"))


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda folder: add(folder, "c"), "added: shards/c.jsonl"),
        (lambda folder: add(folder, "cdefghi"), "added: shards/g.jsonl; and 2 more"),
        (lambda folder: (folder / "b.jsonl").unlink(), "removed: shards/b.jsonl"),
        (change_a_byte, "changed: shards/b.jsonl"),
        (lambda folder: (folder / "a.jsonl").rename(folder / "c.jsonl"), "removed: shards/a.jsonl"),
    ],
)
def test_changes_are_reported_and_other_training_rows_are_refused(
    shards: Path, change: Callable[[Path], None], reported: str
) -> None:
    before = manifest()
    change(shards)
    now = manifest()

    def check(split: str, *, allow_changed: bool) -> list[str]:
        path = Path("run/checkpoints/step-000002")
        checkpoint = Checkpoint(path=path, step=2, config={}, rows={split: before})
        return list(check_rows_unchanged(checkpoint, {split: now}, allow_changed=allow_changed))

    with pytest.raises(CheckpointError, match=r"step-000002.* set data\.allow_changed_rows=true") as refused:
        check("train", allow_changed=False)
    assert reported in str(refused.value)
    [note] = check("train", allow_changed=True)
    assert reported in note
    [note] = check("val", allow_changed=False)
    assert note.startswith("the rows of data.val_files changed since that checkpoint")


def test_the_same_rows_in_other_files_are_not_a_change(shards: Path, tmp_path: Path) -> None:
    before = manifest()
    text = b"".join(path.read_bytes() for path in sorted(shards.iterdir()))
    (tmp_path / "moved.jsonl.gz").write_bytes(gzip.compress(text))
    assert manifest("moved.jsonl.gz").changes_since(before) is None
    assert manifest(str(shards)).changes_since(before) is None
    assert manifest("shards", "shards").changes_since(before) == "the files come in another order or number"
