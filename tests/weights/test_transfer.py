"""All transports that need no GPU, with receivers in other processes, and the handles that they get."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor, nn

from agent_loop.config import WeightTransfer
from agent_loop.errors import ConfigError, WeightsError
from agent_loop.weights.expected import Shape, check_weights, expected_weights, tied_weights
from agent_loop.weights.handle import TensorSpec, Transport, WeightHandle
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender, choose_transport
from tests.harness import examples
from tests.weights.receiving import ROOT, Receiver, blocks, flat, start_unrelated

ON_CPU: tuple[Transport, ...] = ("shared_memory", "broadcast", "disk")
STORABLE = [
    "bfloat16",
    "bool",
    "complex64",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
]
STORABLE += ["int16", "int32", "int8", "uint16", "uint32", "uint64", "uint8"]


def odd_weights(seed: int) -> dict[str, Tensor]:
    """Return one tensor of each kind that is difficult to transfer."""
    torch.manual_seed(seed)
    tied = torch.randn(33, 5)
    return {
        "transposed": torch.randn(7, 3).bfloat16().t(),
        "every other": torch.arange(20)[::2],
        "scalar": torch.tensor(3.5, dtype=torch.float16),
        "empty": torch.empty(0, 4),
        "needs grad": nn.Parameter(torch.randn(4)),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "truths": torch.tensor([True, False, True]),
        "larger than a chunk": torch.randn(1_300_000 + seed),
        "embedding": tied,
        "head": tied,
        "part of embedding": tied[2:4],
        "negative view": torch.randn(6).to(torch.complex64).conj().imag,
    }


@pytest.mark.parametrize("transport", ON_CPU)
def test_tensors_of_all_kinds_are_received_unchanged_and_in_order_in_every_update(
    transport: Transport, receivers: list[Receiver]
) -> None:
    with WeightSender(transport, num_receivers=2, timeout_s=30) as sender:
        for version in range(3):
            weights = odd_weights(version)
            with sender.offer(iter(weights.items()), weight_version=version) as handle:
                for receiver in receivers:
                    receiver.start("receive", handle.to_json())
                replies = [receiver.reply() for receiver in receivers]
            assert handle.weight_version == version
            assert replies == [flat(weights.items())] * 2


@pytest.mark.timeout(120)  # the other receiver may wait for the whole time limit of the broadcast
def test_a_dead_receiver_affects_no_other_and_no_later_offer(
    receivers: list[Receiver], tmp_path: Path
) -> None:
    weights = odd_weights(0)
    with ExitStack() as stack:
        senders = [
            stack.enter_context(WeightSender(transport, num_receivers=2, timeout_s=30))
            for transport in ON_CPU
        ]
        with ExitStack() as offers:
            offers.push(lambda kind, error, _: isinstance(error, WeightsError))  # the broadcast may fail
            handles = [
                offers.enter_context(sender.offer(weights.items(), weight_version=0)).to_json()
                for sender in senders
            ]
            receivers[1].start("receive and exit", json.dumps(handles))
            for handle in handles:
                receivers[0].start("receive", handle)
                reply = receivers[0].reply()
                assert reply == flat(weights.items()) or "the broadcast failed" in str(reply)
            receivers[1].wait()
        receivers[1] = start_unrelated(1, errors=tmp_path / "stderr.txt")
        for sender in senders:
            with sender.offer(weights.items(), weight_version=1) as offer:
                for receiver in receivers:
                    receiver.start("receive", offer.to_json())
                assert [receiver.reply() for receiver in receivers] == [flat(weights.items())] * 2


SENDING = """
import sys, torch
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
weights = {"w": torch.arange(5000)}
with WeightSender("shared_memory") as sender, WeightReceiver() as receiver:
    for version in range(2):
        with sender.offer(weights.items(), weight_version=version) as handle:
            assert torch.equal(dict(receiver.receive(handle.to_json()))["w"], weights["w"])
    try:
        with sender.offer([("w", torch.empty(2, device="meta"))], weight_version=9): pass
    except Exception as error: print(error, flush=True)
sender = WeightSender("shared_memory")
with sender.offer(weights.items(), weight_version=7) as handle:
    print(handle.to_json(), flush=True)
    sys.stdin.read()
"""


def test_a_killed_sender_leaves_no_memory_but_an_error(receivers: list[Receiver], tmp_path: Path) -> None:
    errors = tmp_path / "stderr.txt"
    command = [sys.executable, "-W", "error", "-c", SENDING]
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        assert process.stdout is not None
        assert "meta device" in process.stdout.readline()
        handle = process.stdout.readline()
        for receiver in receivers:
            assert receiver.receive(handle) == flat({"w": torch.arange(5000)}.items())
        assert len(blocks(process.pid)) == 1
        assert errors.read_text() == ""
        process.send_signal(signal.SIGKILL)
        process.wait()
    ends_at = time.monotonic() + 10
    while blocks(process.pid):
        assert time.monotonic() < ends_at, "the resource tracker does not clean up"
    reply = receivers[1].receive(handle)
    assert isinstance(reply, WeightsError)
    assert "not in shared memory" in str(reply)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
named_specs = st.dictionaries(
    st.text(min_size=1, max_size=12), st.tuples(st.sampled_from(STORABLE), shapes), max_size=8
)


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
@examples(40)
@given(specs=named_specs, seed=st.integers(0, 99))
def test_any_dtypes_shapes_and_names_are_received_unchanged(
    transport: Transport, specs: dict[str, tuple[str, tuple[int, ...]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, (dtype, shape) in specs.items():
        high = 2 if dtype == "bool" else 256
        num_bytes = math.prod(shape) * getattr(torch, dtype).itemsize
        data = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
        weights[name] = data.view(getattr(torch, dtype)).view(shape)
    with (
        WeightSender(transport) as sender,
        WeightReceiver() as receiver,
        sender.offer(weights.items(), weight_version=0) as handle,
    ):
        assert flat(receiver.receive(handle.to_json())) == flat(weights.items())


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
