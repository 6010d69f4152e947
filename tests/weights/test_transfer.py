"""Tests of all transports that need no GPU, with receivers in other processes."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import Transport
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
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
