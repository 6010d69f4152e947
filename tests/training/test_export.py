"""Export of a checkpoint as a model folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import assemble
from agent_loop.training.checkpoint import Checkpoint, named_checkpoint, save_checkpoint
from agent_loop.training.export import export_model
from agent_loop.training.learner import Learner, load_learner
from tests.training.fakes import PAD, sample_trajectories, tiny_policy, tiny_tokenizer


def trained(folder: Path, **model: Any) -> tuple[Learner, Checkpoint]:
    """Return a learner after one step, with its checkpoint."""
    tiny_policy().save_pretrained(folder / "base")
    settings = {"path": str(folder / "base"), "device": "cpu", **model}
    config = Config.model_validate({"model": settings, "actor": {"lr": 1e-2}})
    learner = load_learner(config)
    for _ in range(2):  # The first step changes only one of the two matrices of an adapter.
        learner.learn(assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    save_checkpoint(
        folder / "run",
        step=1,
        learner=learner,
        tokenizer=tokenizer,
        config=config.model_dump(mode="json"),
        keep=1,
    )
    return learner, named_checkpoint(folder / "run")


def load(folder: Path, dtype: str = "auto") -> dict[str, Any]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()


@pytest.mark.parametrize("model", [{}, {"lora_rank": 4}], ids=["whole", "lora"])
def test_the_folder_has_the_weights_that_servers_got(tmp_path: Path, model: dict[str, Any]) -> None:
    learner, checkpoint = trained(tmp_path, **model)

    export_model(checkpoint, tmp_path / "out")

    found, moved = load(tmp_path / "out"), 0
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

    assert {value.dtype for value in load(tmp_path / "trained").values()} == {torch.bfloat16}
    full = load(tmp_path / "full")
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
