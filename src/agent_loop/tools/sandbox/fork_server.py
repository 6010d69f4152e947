"""Sandboxes forked from one warm Python process."""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess

from agent_loop.errors import SandboxError
from agent_loop.tools.sandbox.inside import wire
from agent_loop.tools.sandbox.settings import SandboxSettings
from agent_loop.tools.sandbox.source import ENVIRONMENT, SandboxSource, launch_command

START_PATIENCE_S = 60.0
END_PATIENCE_S = 5.0
FULL_QUEUE_PAUSE_S = 0.005
MAX_COMPLAINT_BYTES = 2000


class ForkServer(SandboxSource):
    """Runs the zygote.

    Args:
        settings: Of all sandboxes.
        namespaces: Whether sandboxes are shut in by namespaces; without, by limits alone.
    """

    def __init__(self, settings: SandboxSettings, *, namespaces: bool = True) -> None:
        super().__init__(settings)
        self.mechanism = "namespaces" if namespaces else "limits"
        self._plan = settings.plan(namespaces=namespaces)
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start(self) -> None:
        """Starts the zygote and waits until it is ready."""
        self.close()
        command = launch_command(self.settings.python, mode="zygote", plan=self._plan)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"{self.settings.python} could not be started: {error}") from error
        self._requests = ours
        try:
            self._wait_until_ready(ours, self._process)
        except BaseException:
            self.close()
            raise
        ours.setblocking(False)

    async def spawn(self, control: socket.socket, *, work: str | None) -> None:
        """Asks the zygote to fork."""
        if self._requests is None:
            raise BrokenPipeError("the fork server is closed")
        message = wire.pack({"work": work})
        while True:
            try:
                socket.send_fds(self._requests, [message], [control.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(FULL_QUEUE_PAUSE_S)

    def is_alive(self) -> bool:
        """Whether the zygote runs; it says nothing after its start, so that only its end can be read."""
        return self._requests is not None and not select.select([self._requests], [], [], 0)[0]

    def close(self) -> None:
        """Ends the zygote, and with it all sandboxes that are left."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            try:
                self._process.wait(END_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
        self._process = self._requests = None

    def _wait_until_ready(self, ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
        ours.settimeout(START_PATIENCE_S)
        try:
            received = wire.receive(ours)
        except (OSError, wire.BadMessage) as error:
            raise SandboxError(f"the sandbox's Python did not answer: {error}") from error
        if received is None:
            complaint = process.stderr.read(MAX_COMPLAINT_BYTES) if process.stderr else b""
            raise SandboxError(
                f"{self.settings.python} ended at once; it must be Python 3.11 or newer: "
                f"{complaint.decode(errors='replace').strip()}"
            )
        if "error" in received[0]:
            raise SandboxError(str(received[0]["error"]))
