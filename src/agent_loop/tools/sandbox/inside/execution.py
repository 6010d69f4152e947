"""Communication with the interpreter during one call."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time

from agent_loop.tools.sandbox.inside.interpreter import DONE, FAILED, INTERRUPTED, LENGTH_BYTES, NONCE_BYTES
from agent_loop.tools.sandbox.inside.interpreter_process import WATCH_INTERVAL_S, InterpreterProcess
from agent_loop.tools.sandbox.inside.spec import SandboxSpec

CHUNK_BYTES = 2**16
LAST_CHUNKS = 32
"""Maximum number of chunks read after the verdict, since a remaining process could write without end."""
VERDICTS = {DONE: "done", FAILED: "failed", INTERRUPTED: "interrupted"}


class CodeExecution:
    """Execution of one call: sends the code, collects the output, and enforces the time limit.

    The interpreter is untrusted. Only one byte of its result is used, and only after this call's nonce.
    """

    def __init__(self, child: InterpreterProcess, code: str, *, spec: SandboxSpec) -> None:
        self.verdict = ""
        """`done`, `failed` or `interrupted`; empty while the code runs."""
        self.output = Output(spec.output_bytes)
        self._child = child
        self._nonce = os.urandom(NONCE_BYTES)
        source = code.encode(errors="replace")
        self._to_send = memoryview(self._nonce + len(source).to_bytes(LENGTH_BYTES, "big") + source)
        self._result = b""
        self._grace_s = spec.interrupt_grace_s
        self._deadline = time.monotonic() + spec.time_limit_s
        self._is_interrupted = False

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the pipes of the interpreter."""
        selector.register(self._child.requests, selectors.EVENT_WRITE, self._send)
        selector.register(self._child.results, selectors.EVENT_READ, self._read_result)
        selector.register(self._child.output, selectors.EVENT_READ, self._read_output)

    def handle(self, selector: selectors.BaseSelector) -> set[int | object]:
        """Wait for up to `WATCH_INTERVAL_S`, transfer data, and return the other ready file objects."""
        wait_s = max(0.0, min(self._deadline - time.monotonic(), WATCH_INTERVAL_S))
        others: set[int | object] = set()
        for key, _ in selector.select(wait_s):
            if key.data is None:
                others.add(key.fileobj)
            elif not key.data():
                selector.unregister(key.fileobj)
        return others

    def check_clock(self) -> None:
        """Interrupt the code at the time limit, and kill the interpreter after the grace period."""
        if self.verdict or self._child.exit_cause or time.monotonic() < self._deadline:
            return
        if self._is_interrupted:
            self._child.end("time")
            return
        self._is_interrupted = True
        self._deadline = time.monotonic() + self._grace_s
        os.kill(self._child.pid, signal.SIGINT)

    def read_rest(self) -> None:
        """Read the output that remains in the pipe."""
        for _ in range(LAST_CHUNKS):
            if not self._read_output():
                return

    def _send(self) -> bool:
        try:
            self._to_send = self._to_send[os.write(self._child.requests, self._to_send) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False  # the interpreter is about to exit, or its time limit terminates it
        return len(self._to_send) > 0

    def _read_result(self) -> bool:
        data = os.read(self._child.results, NONCE_BYTES + 2)
        self._result += data
        if not data:
            self._child.wait_for_exit()
            return False
        if not self._result.startswith(self._nonce[: len(self._result)]):
            self._child.end("channel")
            return False
        if len(self._result) <= NONCE_BYTES:
            return True
        verdict = VERDICTS.get(self._result[NONCE_BYTES:])
        if verdict is None:
            self._child.end("channel")
        else:
            self.verdict = "interrupted" if self._is_interrupted else verdict
        return False

    def _read_output(self) -> bool:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._child.output, CHUNK_BYTES)
            self.output.add(data)
        return len(data) > 0


class Output:
    """Buffer of the beginning and the end of a stream. Its memory is limited to `limit_bytes` and one chunk."""

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
