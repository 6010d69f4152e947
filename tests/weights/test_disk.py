from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agent_loop.errors import WeightsError
from agent_loop.weights import disk
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender

WEIGHTS = {"a": torch.arange(3000.0), "b": torch.arange(7), "c": torch.ones(40, 40)}


def tiny_llama(*, tie: bool = True) -> Any:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=1, tie_word_embeddings=tie, **sizes)
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("old weights")
    return folder


def test_the_folder_exists_while_the_offer_is_open(tmp_path: Path) -> None:
    with WeightSender("disk", folder=tmp_path) as sender:
        with sender.offer(WEIGHTS.items(), weight_version=5) as handle:
            folder = Path(handle.source["folder"])
            assert folder.parent == tmp_path
            assert [path.name for path in tmp_path.iterdir()] == [folder.name]
            assert load_file(folder / "model.safetensors")["b"].tolist() == list(range(7))
        assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    weights = [("a", torch.ones(2)), ("b", torch.empty(2, device="meta"))]
    with (
        WeightSender("disk", folder=tmp_path) as sender,
        pytest.raises(WeightsError, match="meta device"),
        sender.offer(weights, weight_version=0),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(1 << 30, 1), (3000, 6)])
def test_an_offer_can_be_a_checkpoint_that_loads_as_the_model(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int, num_files: int
) -> None:
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    # The head comes first, so that its name would be written if the names in `like` were ignored.
    weights = {"lm_head.weight": model.lm_head.weight, **model.state_dict()}
    monkeypatch.setattr(disk, "SHARD_BYTES", shard_bytes)
    with (
        WeightSender("disk", like=model_folder) as sender,
        sender.offer(weights.items(), weight_version=0) as handle,
    ):
        folder = Path(handle.source["folder"])
        names = {path.name for path in folder.iterdir()}
        assert len([name for name in names if name.endswith(".safetensors")]) == num_files
        assert {"config.json", "tokenizer.json"} <= names
        assert "pytorch_model.bin" not in names
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        assert dict(WeightReceiver().receive(handle)).keys() == weights.keys()


def test_a_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    save_file(WEIGHTS, tmp_path / "like" / "model.safetensors")
    with (
        WeightSender("disk", folder=tmp_path / "out", like=tmp_path / "like") as sender,
        pytest.raises(WeightsError, match=r"no config\.json"),
        sender.offer(WEIGHTS.items(), weight_version=0),
    ):
        pass
    assert not list((tmp_path / "out").iterdir())
