"""Handles of offers, and the weights that a model expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from agent_loop.config import WeightTransfer
from agent_loop.errors import ConfigError, WeightsError
from agent_loop.weights.expected import Shape, check_weights, expected_weights, tied_weights
from agent_loop.weights.handle import TensorSpec, WeightHandle
from agent_loop.weights.sender import choose_transport

HANDLE = WeightHandle(
    transport="disk",
    weight_version=3,
    tensors=(TensorSpec("a", "bfloat16", (2, 3), 2, 0, 0, 17), TensorSpec("b", "bool", (), 1, 1, 64, 5)),
    source={"folder": "/nowhere"},
)

specs = st.builds(
    TensorSpec,
    name=st.text(),
    dtype=st.sampled_from(["bfloat16", "bool"]),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    item_bytes=st.integers(1, 8),
    bucket=st.integers(0, 2**20),
    offset=st.integers(0, 2**50),
    checksum=st.integers(0, 2**32 - 1),
)


@given(st.lists(specs, unique_by=lambda spec: spec.name).map(tuple), st.integers(0, 2**60))
def test_a_handle_survives_a_json_round_trip(tensors: tuple[TensorSpec, ...], weight_version: int) -> None:
    handle = WeightHandle("broadcast", weight_version, tensors, {"port": 1})
    assert WeightHandle.from_json(handle.to_json()) == handle
    with_base = replace(HANDLE, base=handle, base_id="b")
    assert WeightHandle.from_json(with_base.to_json().encode()) == with_base


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(HANDLE.to_json()) | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a weight handle"),
        ("[]", "Expected `object`"),
        (changed(transport="pigeon"), "pigeon"),
        (changed(weight_version=-1), "weight_version"),
        (changed(checksums=True), "unknown field"),
        (changed(tensors=[["a", "int8", [1], 1, 0, -8, 0]]), "tensors"),
    ],
)
def test_an_invalid_handle_is_rejected_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        WeightHandle.from_json(text)


EXPECTED: dict[str, Shape] = {
    "model.embed_tokens.weight": (50, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (50, 8),
}
TIED = (("model.embed_tokens.weight", "lm_head.weight"),)


def zeros(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(EXPECTED[name]) for name in names}


def test_only_files_in_the_index_are_read_and_unreadable_weights_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no safetensors files"):
        expected_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(WeightsError, match="cannot be read"):
        expected_weights(tmp_path)
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(())}, tmp_path / "two.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "left over.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert expected_weights(tmp_path) == {"a": (2, 3), "b": ()}
    index.write_text("{}")
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
    save_file(zeros(*names), tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert tied_weights(tmp_path) == (TIED if is_tied else ())


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
            "no weight .*norms.weight'; did you mean 'model.norm.weight'",
        ),
        ({"model.norm.weight": torch.zeros(9)}, r"has shape \(9,\), but the model's is \(8,\)"),
        (zeros("model.norm.weight"), "2 of the model's 3 weights are missing, 'model.embed_tokens.weight'"),
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
        ("cuda_ipc", False, True, "not on a GPU"),
        ("shared_memory", False, False, "another machine"),
    ],
)
def test_the_transport_depends_on_the_setting_the_device_and_the_host(
    configured: WeightTransfer, weights_on_gpu: bool, same_host: bool, chosen: str
) -> None:
    if " " in chosen:
        with pytest.raises(ConfigError, match=chosen):
            choose_transport(configured, weights_on_gpu=weights_on_gpu, same_host=same_host)
    else:
        assert choose_transport(configured, weights_on_gpu=weights_on_gpu, same_host=same_host) == chosen
