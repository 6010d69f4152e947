"""Sandboxes forked from one Python process with preloaded modules, the zygote."""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess
from typing import Literal

from agent_loop.errors import SandboxError
from agent_loop.tools.sandbox.backend import ENVIRONMENT, SandboxBackend, launch_command
from agent_loop.tools.sandbox.inside import socket_messages
from agent_loop.tools.sandbox.inside.spec import SCOPED_SIGNALS_VERSION, SandboxSpec
from agent_loop.tools.sandbox.settings import SandboxSettings

START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 5.0
FULL_QUEUE_PAUSE_S = 0.005
MAX_STDERR_BYTES = 2000


class ForkServer(SandboxBackend):
    """Backend that forks sandboxes from a zygote process.

    Args:
        settings: Settings of all sandboxes.
        mechanism: Isolation mechanism: namespaces, Landlock, or limits alone.
    """

    def __init__(
        self, settings: SandboxSettings, *, mechanism: Literal["namespaces", "landlock", "limits"]
    ) -> None:
        super().__init__(settings)
        self.mechanism = mechanism
        self._spec = settings.spec(mechanism)
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start(self) -> None:
        """Start the zygote and wait until it is ready.

        Raises:
            SandboxError: The zygote could not be started, or the mechanism does not work here.
        """
        self.close()
        if self.mechanism == "landlock":
            check_landlock(self._spec)
        command = launch_command(self.settings.python, mode="zygote", spec=self._spec)
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
        """Request a fork from the zygote."""
        if self._requests is None:
            raise BrokenPipeError("the fork server is closed")
        message = socket_messages.pack({"work": work})
        while True:
            try:
                socket.send_fds(self._requests, [message], [control.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(FULL_QUEUE_PAUSE_S)

    def is_alive(self) -> bool:
        """Return whether the zygote runs. It sends nothing after its start, so readable data means that it closed."""
        return self._requests is not None and not select.select([self._requests], [], [], 0)[0]

    def close(self) -> None:
        """Terminate the zygote. Open sandboxes terminate with it under namespaces, otherwise when they are closed."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            try:
                self._process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()
        self._process = self._requests = None

    def _wait_until_ready(self, ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
        ours.settimeout(START_TIMEOUT_S)
        try:
            received = socket_messages.receive(ours)
        except (OSError, socket_messages.BadMessage) as error:
            raise SandboxError(f"the sandbox's Python did not respond: {error}") from error
        if received is None:
            output = process.stderr.read(MAX_STDERR_BYTES) if process.stderr else b""
            raise SandboxError(
                f"{self.settings.python} exited during its start; it must be Python 3.11 or newer: "
                f"{output.decode(errors='replace').strip()}"
            )
        if "error" in received[0]:
            raise SandboxError(str(received[0]["error"]))


def check_landlock(spec: SandboxSpec) -> None:
    """Check that the kernel's Landlock has what a sandbox needs.

    Raises:
        SandboxError: Landlock is missing, or its version cannot contain signals.
    """
    if spec.landlock_version == 0:
        raise SandboxError(
            "the kernel has no Landlock: it is older than Linux 5.13, `lsm=` on its command line does not list "
            "Landlock, or the container forbids it"
        )
    if not spec.signals_are_contained:
        raise SandboxError(
            f"Landlock version {spec.landlock_version} of this kernel does not contain signals; "
            f"use version {SCOPED_SIGNALS_VERSION} (Linux 6.12), or run the agent as root"
        )
