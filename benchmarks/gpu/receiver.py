"""A process that receives weights from another process, as an engine does.

    python -m benchmarks.gpu.receiver DEVICE RANK

Each line of standard input is the handle of an offer; the reply is a line with the checksum of all tensors. The process
ends with its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.tensors import checksum
from benchmarks.gpu.stage_process import ROOT

REPLY = "checksum: "
"""Prefix of a reply. Other lines of the output are passed on."""


class Receiver:
    """The process, as the sender sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def receive(self, handle: str) -> str:
        """Let the process receive an offer, and return the checksums of its copy.

        Raises:
            RuntimeError: The process ended. Its error is in the output above.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(handle + "\n")
        stdin.flush()
        for line in stdout:
            if line.startswith(REPLY):
                return line.removeprefix(REPLY).strip()
            print(line, end="", flush=True)
        raise RuntimeError(f"the receiver ended with exit status {self._process.wait()}")


@contextmanager
def receiving(device: torch.device, *, rank: int = 0) -> Iterator[Receiver]:
    """Start the process, and end it at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(device), str(rank)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Receiver(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def checksums(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return the checksums of tensors by their names."""
    return " ".join(
        f"{name}={checksum(tensor.detach().contiguous().reshape(-1).view(torch.uint8))}"
        for name, tensor in weights
    )


def main(device: str, rank: str) -> None:
    """Receive offers until the standard input ends."""
    index = torch.device(device).index
    if index is not None:
        torch.cuda.set_device(index)
    torch.set_num_threads(1)
    with WeightReceiver(int(rank)) as receiver:
        for line in sys.stdin:
            own = {
                name: torch.empty_like(tensor, device=device).copy_(tensor)
                for name, tensor in receiver.receive(line)
            }
            print(REPLY + checksums(own.items()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
