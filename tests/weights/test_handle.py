from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent_loop.errors import WeightsError
from agent_loop.weights import TensorSpec, WeightHandle
from agent_loop.weights.handle import DTYPE_BYTES

HANDLE = WeightHandle(
    transport="disk",
    weight_version=3,
    tensors=(TensorSpec("a", "bfloat16", (2, 3), 0, 0, 17), TensorSpec("b", "bool", (), 1, 64, None)),
    source={"folder": "/nowhere"},
)

specs = st.builds(
    TensorSpec,
    name=st.text(),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    bucket=st.integers(0, 2**20),
    offset=st.integers(0, 2**50),
    checksum=st.none() | st.integers(0, 2**32 - 1),
)


@given(st.lists(specs, unique_by=lambda spec: spec.name).map(tuple), st.integers(0, 2**60), st.booleans())
def test_a_handle_is_unchanged_by_a_json_round_trip(
    tensors: tuple[TensorSpec, ...], weight_version: int, has_checksums: bool
) -> None:
    handle = WeightHandle("broadcast", weight_version, tensors, {"port": 1}, has_checksums)
    assert WeightHandle.from_json(handle.to_json()) == handle
    assert WeightHandle.from_json(handle.to_json().encode()) == handle
    with_base = replace(HANDLE, base=handle, base_id="b")
    assert WeightHandle.from_json(with_base.to_json()) == with_base


def test_a_handle_of_a_thousand_tensors_is_small() -> None:
    name = "model.layers.17.mlp.experts.100.down_proj.weight"
    tensors = tuple(TensorSpec(f"{name}{i}", "bfloat16", (4096, 4096), 3, 2**33, 2**31) for i in range(1000))
    handle = WeightHandle("shared_memory", 1, tensors, {})
    assert len(handle.to_json()) < 130_000
    assert handle.num_bytes == 1000 * 4096 * 4096 * 2


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(HANDLE.to_json()) | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "a JSON list"),
        (b"\xff", "not JSON"),
        (changed(format=99), "its format is 99"),
        (changed(transport="pigeon"), "its transport is 'pigeon'"),
        (changed(weight_version=-1), "its weight_version is -1"),
        (changed(weight_version=True), "its weight_version is True"),
        (changed(has_checksums=None), "has_checksums"),
        (changed(source=[]), "source"),
        (changed(tensors=None), "the list of tensors is missing"),
        (changed(tensors=[["a"]]), r"a tensor is \['a'\]"),
        (changed(tensors=[["a", "float99", [1], 0, 0, None]]), "float99"),
        (changed(tensors=[["a", [], [1], 0, 0, None]]), "a tensor is"),
        (changed(tensors=[["a", "int8", [-1], 0, 0, None]]), "a tensor is"),
        (changed(tensors=[["a", "int8", [1], 0, -8, None]]), "a tensor is"),
        (changed(tensors=[["a", "int8", [1], 0, 0, "x"]]), "the checksum of 'a' is 'x'"),
        (changed(tensors=[["a", "int8", [1], 0, 0, 1]] * 2), "'a' was published 2 times"),
        (changed(base_id="b"), "its base_id is 'b'"),
        (changed(base=json.loads(HANDLE.to_json())), "its base_id is ''"),
        (changed(base=None, base_id="b"), "a JSON NoneType"),
        (changed(base=json.loads(changed(tensors=None)), base_id="b"), "the list of tensors is missing"),
        (
            changed(base=json.loads(replace(HANDLE, base=HANDLE, base_id="a").to_json()), base_id="b"),
            "its base has a base",
        ),
    ],
)
def test_an_invalid_handle_is_rejected_with_the_reason(text: str | bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        WeightHandle.from_json(text)


def test_a_missing_field_of_the_source_is_named() -> None:
    with pytest.raises(WeightsError, match="port of its source is None"):
        HANDLE.field("port", int)
