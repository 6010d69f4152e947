from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import TensorSpec, WeightHandle

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
def test_a_handle_is_unchanged_by_a_json_round_trip(
    tensors: tuple[TensorSpec, ...], weight_version: int
) -> None:
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
