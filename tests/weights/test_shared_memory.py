from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import WeightHandle
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from tests.weights.receiving import SHARED_MEMORY, blocks

WEIGHTS = {"a": torch.arange(3000, dtype=torch.float32), "b": torch.arange(7, dtype=torch.int8)}


def block_names(handle: WeightHandle) -> list[str]:
    return [name for name, _ in handle.source["blocks"]]


def overwrite(path: Path, *, offset: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", ["a", "b"])
def test_one_wrong_bit_raises_an_error_before_any_tensor_is_returned(name: str) -> None:
    with WeightSender("shared_memory") as sender, sender.offer(WEIGHTS.items(), weight_version=0) as handle:
        spec = next(spec for spec in handle.tensors if spec.name == name)
        (block,) = block_names(handle)
        overwrite(SHARED_MEMORY / block, offset=spec.offset + spec.num_bytes - 1)
        with pytest.raises(WeightsError, match=f"weight '{name}' was damaged in transfer"):
            WeightReceiver().receive(handle.to_json())


def test_a_block_is_reused_and_deleted_when_the_sender_is_closed() -> None:
    with WeightSender("shared_memory") as sender:
        with sender.offer(WEIGHTS.items(), weight_version=0) as handle:
            first = block_names(handle)
        with sender.offer(WEIGHTS.items(), weight_version=1) as handle:
            assert block_names(handle) == first
        assert set(first) <= blocks()
    assert not set(first) & blocks()
    sender.close()
    with (
        pytest.raises(WeightsError, match="closed"),
        sender.offer(WEIGHTS.items(), weight_version=2),
    ):
        pass


def test_the_memory_of_a_failed_offer_is_not_reused() -> None:
    with WeightSender("shared_memory") as sender:
        with (
            pytest.raises(RuntimeError, match="control channel"),
            sender.offer(WEIGHTS.items(), weight_version=0) as handle,
        ):
            late = dict(WeightReceiver().receive(handle))
            raise RuntimeError("the control channel broke")
        assert not set(block_names(handle)) & blocks()
        with sender.offer([("a", torch.zeros(3000))], weight_version=1):
            assert torch.equal(late["a"], WEIGHTS["a"])


def test_full_shared_memory_raises_an_error_instead_of_killing_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with (
        WeightSender("shared_memory") as sender,
        pytest.raises(WeightsError, match=r"no room for 12,000 more bytes.*--shm-size"),
        sender.offer(WEIGHTS.items(), weight_version=0),
    ):
        pass


def test_weights_without_data_and_duplicates_are_rejected() -> None:
    sparse = torch.eye(3).to_sparse()
    refused = {
        "meta device": [("w", torch.empty(2, device="meta"))],
        "plain dense": [("w", sparse)],
        "published twice": [("w", torch.ones(2))] * 2,
    }
    with WeightSender("shared_memory") as sender:
        for message, weights in refused.items():
            with (
                pytest.raises(WeightsError, match=message),
                sender.offer(weights, weight_version=0),
            ):
                pass
