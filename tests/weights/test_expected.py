from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from agent_loop.config import WeightTransfer
from agent_loop.errors import ConfigError, WeightsError
from agent_loop.weights.expected import Shape, check_weights, expected_weights, tied_weights
from agent_loop.weights.sender import choose_transport

EXPECTED: dict[str, Shape] = {
    "model.embed_tokens.weight": (50, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (50, 8),
}
TIED = (("model.embed_tokens.weight", "lm_head.weight"),)


def write_model(folder: Path, *, names: list[str], config: dict[str, object] | None = None) -> Path:
    weights = {name: torch.zeros(EXPECTED[name]) for name in names}
    save_file(weights, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_only_files_in_the_index_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(())}, tmp_path / "two.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "left over.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert expected_weights(tmp_path) == {"a": (2, 3), "b": ()}
    index.write_text("{}")
    with pytest.raises(WeightsError, match="cannot be read"):
        expected_weights(tmp_path)


def test_a_folder_without_readable_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no safetensors files"):
        expected_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(WeightsError, match="cannot be read"):
        expected_weights(tmp_path)


@pytest.mark.parametrize(
    ("names", "config", "is_tied"),
    [
        (list(EXPECTED), {"tie_word_embeddings": False}, False),
        (list(EXPECTED), {"tie_word_embeddings": True}, True),
        (list(EXPECTED), {"text_config": {"tie_word_embeddings": True}}, True),
        (list(EXPECTED), None, False),
        (["model.embed_tokens.weight", "model.norm.weight"], {}, True),
        (["model.norm.weight"], {"tie_word_embeddings": True}, False),
    ],
)
def test_embedding_and_head_are_tied_if_configured_so_or_if_the_head_is_not_stored(
    tmp_path: Path, names: list[str], config: dict[str, object] | None, is_tied: bool
) -> None:
    assert tied_weights(write_model(tmp_path, names=names, config=config)) == (TIED if is_tied else ())


def zeros(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(EXPECTED[name]) for name in names}


@pytest.mark.parametrize("left_out", [None, "model.embed_tokens.weight", "lm_head.weight"])
def test_one_name_of_tied_weights_is_enough(left_out: str | None) -> None:
    given = zeros(*[name for name in EXPECTED if name != left_out])
    check_weights(EXPECTED, given, tied=TIED)
    without_head = {name: EXPECTED[name] for name in EXPECTED if name != "lm_head.weight"}
    check_weights(without_head, given, tied=TIED)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model.norms.weight": torch.zeros(8)},
            "no weight 'model.norms.weight'; did you mean 'model.norm.weight'",
        ),
        ({"model.norm.weight": torch.zeros(9)}, r"has shape \(9,\), but the model's is \(8,\)"),
        (
            zeros("model.norm.weight"),
            "2 of the model's 3 weights are missing, 'model.embed_tokens.weight' first",
        ),
    ],
)
def test_weights_that_do_not_fit_are_rejected_with_their_name(given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        check_weights(EXPECTED, given)


@pytest.mark.parametrize(
    ("configured", "weights_on_gpu", "same_host", "chosen"),
    [
        ("auto", True, True, "cuda_ipc"),
        ("auto", False, True, "shared_memory"),
        ("auto", True, False, "disk"),
        ("broadcast", True, False, "broadcast"),
    ],
)
def test_the_transport_depends_on_the_setting_the_device_and_the_host(
    configured: WeightTransfer, weights_on_gpu: bool, same_host: bool, chosen: str
) -> None:
    assert choose_transport(configured, weights_on_gpu=weights_on_gpu, same_host=same_host) == chosen


def test_an_impossible_transport_is_rejected() -> None:
    with pytest.raises(ConfigError, match="not on a GPU"):
        choose_transport("cuda_ipc", weights_on_gpu=False, same_host=True)
    with pytest.raises(ConfigError, match="another machine"):
        choose_transport("shared_memory", weights_on_gpu=False, same_host=False)
