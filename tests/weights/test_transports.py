"""Each transport alone: what it writes, refuses and frees."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agent_loop.errors import WeightsError
from agent_loop.weights import broadcast, disk
from agent_loop.weights.broadcast import serve_store
from agent_loop.weights.handle import WeightHandle
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from tests.listeners import is_loopback, listening_addresses
from tests.weights.receiving import SHARED_MEMORY, Receiver, block_names, blocks, flat

WEIGHTS = {"a": torch.arange(3000, dtype=torch.float32), "b": torch.arange(7, dtype=torch.int8)}


def refuse(
    sender: WeightSender, weights: Iterable[tuple[str, Tensor]] = WEIGHTS.items(), *, match: str
) -> None:
    """Check that an offer is refused."""
    with sender, pytest.raises(WeightsError, match=match), sender.offer(weights, weight_version=0):
        pass


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
    refuse(sender, match="closed")


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


def test_full_shared_memory_is_an_error_and_kills_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    refuse(WeightSender("shared_memory"), match=r"no room for 12,000 more bytes.*--shm-size")


@pytest.mark.parametrize(
    ("message", "weights"),
    [
        ("meta device", [("w", torch.empty(2, device="meta"))]),
        ("plain dense", [("w", torch.eye(3).to_sparse())]),
        ("published twice", [("w", torch.ones(2))] * 2),
    ],
)
def test_weights_without_data_and_duplicates_fail(message: str, weights: list[tuple[str, Tensor]]) -> None:
    refuse(WeightSender("shared_memory"), weights, match=message)


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
    refuse(WeightSender("disk", folder=tmp_path), weights, match="meta device")
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
    sender = WeightSender("disk", folder=tmp_path / "out", like=tmp_path / "like")
    refuse(sender, match=r"no config\.json")
    assert not list((tmp_path / "out").iterdir())


TENSORS = {str(i): torch.full((1000,), float(i)) for i in range(6)}

InThread = Callable[..., "Future[Iterable[tuple[str, Tensor]]]"]


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[InThread]:
    monkeypatch.setattr(broadcast, "GLOO_BUCKET_BYTES", 8500)  # two of the tensors
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def test_the_default_process_group_is_not_changed_or_created(in_thread: InThread) -> None:
    def update(sender: WeightSender, receiver: WeightReceiver) -> None:
        with sender.offer(TENSORS.items(), weight_version=0) as handle:
            received = dict(in_thread(receiver.receive, handle.to_json()).result(30))
            assert all(torch.equal(received[name], tensor) for name, tensor in TENSORS.items())

    with WeightSender("broadcast", timeout_s=30) as sender, WeightReceiver() as receiver:
        update(sender, receiver)
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            update(sender, receiver)
            ones = torch.ones(2)
            dist.all_reduce(ones)
            assert ones.tolist() == [1, 1]
        finally:
            dist.destroy_process_group()


def test_the_store_of_a_local_broadcast_listens_on_loopback_only() -> None:
    before = Counter(listening_addresses([os.getpid()]))
    store = serve_store("127.0.0.1")
    new = Counter(listening_addresses([os.getpid()])) - before
    assert len(new) == 1
    assert all(map(is_loopback, new))
    del store


def test_a_receiver_that_does_not_join_is_named_after_the_time_limit() -> None:
    sender = WeightSender("broadcast", num_receivers=2, timeout_s=0.2)
    refuse(sender, match=r"of 2 receivers of a broadcast, \[0, 1\] did not join within 0.2 s")


def test_an_error_of_the_caller_is_raised_and_aborts_waiting_receivers(in_thread: InThread) -> None:
    with WeightSender("broadcast", num_receivers=2, timeout_s=30) as sender, WeightReceiver(1) as receiver:
        with (
            pytest.raises(RuntimeError, match="the control channel broke"),
            sender.offer(TENSORS.items(), weight_version=0) as handle,
        ):
            waiting = in_thread(receiver.receive, handle)
            raise RuntimeError("the control channel broke")
        with pytest.raises(WeightsError, match="aborted this offer"):
            waiting.result(10)


def test_a_sender_that_has_ended_raises_an_error_in_the_receiver(in_thread: InThread) -> None:
    with WeightSender("broadcast", timeout_s=2) as sender, WeightReceiver() as receiver:
        with sender.offer(TENSORS.items(), weight_version=0) as handle:
            in_thread(receiver.receive, handle).result(30)
        sender.close()
        with pytest.raises(WeightsError, match="no sender of weights answers"):
            receiver.receive(handle)


def test_weights_on_the_cpu_are_rejected() -> None:
    weights = [("w", torch.ones(3))]
    refuse(WeightSender("cuda_ipc"), weights, match=r"weight 'w' is on cpu.*shared_memory")


def test_a_rank_outside_of_the_offer_is_rejected() -> None:
    handle = WeightHandle("cuda_ipc", 0, (), {"gpu": "", "exports": [[]]})
    assert WeightReceiver(0).receive(handle) == []
    with pytest.raises(WeightsError, match="for 1 receivers, but this one has rank 1"):
        WeightReceiver(1).receive(handle)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_other_processes_receive_tensors_on_a_gpu(receivers: list[Receiver]) -> None:
    weights = {"a": torch.randn(1000, 30).bfloat16(), "b": torch.arange(5)}
    on_gpu = {name: tensor.cuda() for name, tensor in weights.items()}
    with WeightSender("cuda_ipc", num_receivers=2) as sender:
        for version in range(3):
            with sender.offer(on_gpu.items(), weight_version=version) as handle:
                for receiver in receivers:
                    assert receiver.receive(handle.to_json()) == flat(weights.items())
