"""Sandboxes forked from one warm Python process."""

from __future__ import annotations

import asyncio
import select
import socket
import subprocess
from typing import Literal

from agent_loop.errors import SandboxError
from agent_loop.tools.sandbox.inside import wire
from agent_loop.tools.sandbox.inside.plan import SCOPED_SIGNALS_VERSION, Plan
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
        mechanism: What shuts sandboxes in: namespaces, Landlock, or limits alone.
    """

    def __init__(
        self, settings: SandboxSettings, *, mechanism: Literal["namespaces", "landlock", "limits"]
    ) -> None:
        super().__init__(settings)
        self.mechanism = mechanism
        self._plan = settings.plan(mechanism)
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start(self) -> None:
        """Starts the zygote and waits until it is ready."""
        self.close()
        if self.mechanism == "landlock":
            check_landlock(self._plan)
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
        """Ends the zygote. Sandboxes that are left end with it under namespaces, else when they are closed."""
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


def check_landlock(plan: Plan) -> None:
    """Looks for what a sandbox needs of the kernel, so that its absence has a name.

    Raises:
        SandboxError: It is not there.
    """
    if plan.landlock_version == 0:
        raise SandboxError(
            "the kernel has no Landlock: it is older than Linux 5.13, started without it in `lsm=`, or the container "
            "forbids it"
        )
    if not plan.reaches_own_alone:
        raise SandboxError(
            f"Landlock {plan.landlock_version} of this kernel does not keep signals inside; "
            f"it takes {SCOPED_SIGNALS_VERSION} (Linux 6.12), or an agent that runs as root"
        )
