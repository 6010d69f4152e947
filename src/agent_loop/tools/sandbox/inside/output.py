"""Output of a call, truncated while it is received."""

from __future__ import annotations


class Output:
    """Buffer of the beginning and the end of a stream. Its memory is limited to `limit_bytes` and one chunk.

    Args:
        limit_bytes: Number of bytes to keep, half from the beginning and half from the end.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._head_bytes = limit_bytes // 2
        self._tail_bytes = limit_bytes - self._head_bytes
        self._head = b""
        self._tail = b""
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Append the next bytes."""
        self._num_bytes += len(data)
        missing = self._head_bytes - len(self._head)
        self._head += data[:missing]
        self._tail = (self._tail + data[missing:])[-self._tail_bytes :]

    @property
    def dropped_bytes(self) -> int:
        """Number of bytes between the two ends that were dropped."""
        return self._num_bytes - len(self._head) - len(self._tail)

    def text(self) -> str:
        """Return the output, with a line that states the number of dropped bytes, if any."""
        if not self.dropped_bytes:
            return (self._head + self._tail).decode(errors="replace")
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        return f"{head}\n[... {self.dropped_bytes} bytes of output left out ...]\n{tail}"
