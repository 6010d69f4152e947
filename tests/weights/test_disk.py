from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agent_loop.errors import WeightsError
from agent_loop.weights import WeightReceiver, WeightSender, disk, write_checkpoint

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
            folder = Path(handle.field("folder", str))
            assert folder.parent == tmp_path
            assert [path.name for path in tmp_path.iterdir()] == [folder.name]
            assert load_file(folder / "model.safetensors")["b"].tolist() == list(range(7))
        assert not list(tmp_path.iterdir())
    with (
        WeightSender("disk", folder=tmp_path, keep=True) as sender,
        sender.offer(WEIGHTS.items(), weight_version=5) as handle,
    ):
        pass
    assert WeightReceiver().receive_all(handle).keys() == WEIGHTS.keys()


def test_a_temporary_folder_is_created_and_deleted_if_no_folder_is_given() -> None:
    with WeightSender("disk") as sender:
        with sender.offer(WEIGHTS.items(), weight_version=0) as handle:
            folder = Path(handle.field("folder", str))
            assert folder.is_dir()
        assert folder.parent.is_dir()
        with pytest.raises(WeightsError, match="the offer has ended"):
            WeightReceiver().receive_all(handle)
    assert not folder.parent.exists()


def test_one_wrong_bit_raises_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    with (
        WeightSender("disk", folder=tmp_path) as sender,
        sender.offer(WEIGHTS.items(), weight_version=0) as handle,
    ):
        file = Path(handle.field("folder", str)) / "model.safetensors"
        stored = load_file(file)
        stored["c"][3, 5] += 1e-6
        save_file(stored, file)
        with pytest.raises(WeightsError, match="weight 'c' was damaged in transfer"):
            WeightReceiver().receive_all(handle.to_json())
        save_file(stored | {"c": torch.ones(2)}, file)
        with pytest.raises(WeightsError, match="weight 'c' on disk has another dtype or shape"):
            WeightReceiver().receive_all(handle.to_json())
        file.write_bytes(b"garbage!")
        with pytest.raises(WeightsError, match="cannot be read"):
            WeightReceiver().receive_all(handle.to_json())


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    weights = [("a", torch.ones(2)), ("b", torch.empty(2, device="meta"))]
    with (
        WeightSender("disk", folder=tmp_path) as sender,
        pytest.raises(WeightsError, match="meta device"),
        sender.offer(weights, weight_version=0),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_written_checkpoint_loads_as_the_model(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    # The head comes first, so that its name would be written if the names in `like` were ignored.
    weights = {"lm_head.weight": model.lm_head.weight, **model.state_dict()}
    for shard_bytes, num_files in ((1 << 30, 1), (3000, 6)):
        monkeypatch.setattr(disk, "SHARD_BYTES", shard_bytes)
        folder = tmp_path / str(num_files)
        files = write_checkpoint(weights.items(), folder=folder, like=model_folder)
        assert len(files) == num_files
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "tokenizer.json", *files} <= names
        assert "pytorch_model.bin" not in names
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def test_an_offer_can_be_a_checkpoint(model_folder: Path) -> None:
    model = tiny_llama()
    with (
        WeightSender("disk", like=model_folder) as sender,
        sender.offer(model.state_dict().items(), weight_version=0) as handle,
    ):
        loaded: Any = AutoModelForCausalLM.from_pretrained(handle.field("folder", str))
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
        assert WeightReceiver().receive_all(handle).keys() == model.state_dict().keys()


def test_a_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    save_file(WEIGHTS, tmp_path / "like" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"no config\.json"):
        write_checkpoint(WEIGHTS.items(), folder=tmp_path / "out", like=tmp_path / "like")
    assert [path.name for path in tmp_path.iterdir()] == ["like"]
