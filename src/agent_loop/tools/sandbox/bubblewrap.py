"""Sandboxes created with bubblewrap, each with its own start of Python.

They are slower than forks, and they work on systems where only bubblewrap may create namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

from agent_loop.errors import SandboxError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.sandbox.backend import ENVIRONMENT, PACKAGE, SandboxBackend, launch_command
from agent_loop.tools.sandbox.inside.root_filesystem import (
    DEVICES,
    SANDBOX,
    SYSTEM_FILES,
    SYSTEM_FOLDERS,
    USER_ID,
)
from agent_loop.tools.sandbox.settings import SandboxSettings

WAIT_TIMEOUT_S = 60.0
PRINT_PREFIXES = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
INSIDE = PACKAGE / "tools" / "sandbox" / "inside"


class Bubblewrap(SandboxBackend):
    """Backend that starts one `bwrap` process per sandbox.

    Args:
        settings: Settings of all sandboxes.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self.mechanism = "bubblewrap"
        self._spec = settings.spec("bubblewrap")
        self._command: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Find bubblewrap and build its command.

        Raises:
            SandboxError: The program does not exist, or Python cannot be started.
        """
        program = shutil.which(self.settings.bubblewrap)
        if program is None:
            raise SandboxError(f"there is no program {self.settings.bubblewrap}; install bubblewrap")
        self._command = [program, *self._make_options()]

    async def spawn(self, control: socket.socket, *, work: str | None) -> None:
        """Start `bwrap`."""
        self._collect()
        self._processes.append(await run_in_thread(self._popen, control))

    def is_alive(self) -> bool:
        """Return True, since sandboxes share no process."""
        return True

    def close(self) -> None:
        """Wait for the processes of closed sandboxes."""
        for process in self._processes:
            process.wait(WAIT_TIMEOUT_S)
        self._collect()

    def _collect(self) -> None:
        self._processes = [process for process in self._processes if process.poll() is None]

    def _popen(self, control: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=control.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
            cwd="/",
        )

    def _make_options(self) -> list[str]:
        options = ["--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--new-session"]
        options += [
            "--uid",
            str(USER_ID),
            "--gid",
            str(USER_ID),
            "--hostname",
            "sandbox",
        ]
        options += ["--cap-drop", "ALL"]
        for path in (
            *SYSTEM_FOLDERS,
            *SYSTEM_FILES,
            *self._python_folders(),
            *self._shown(),
        ):
            options += _show(path)
        options += ["--proc", "/proc"]
        for name in DEVICES:
            options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        options += ["--size", str(self._spec.temp_dir_bytes), "--tmpfs", SANDBOX]
        for link, folder in (("/tmp", "tmp"), ("/var/tmp", "tmp"), ("/dev/shm", "shm")):
            if not any(option.startswith(f"{link}/") for option in options):
                options += ["--symlink", f"{SANDBOX}/{folder}", link]
        options += ["--remount-ro", "/", "--chdir", "/"]
        launch = launch_command(self.settings.python, mode="single", spec=self._spec)
        return [*options, "--", *launch]

    def _shown(self) -> list[str]:
        return [*self._spec.visible, str(INSIDE)]

    def _python_folders(self) -> list[str]:
        command = [self.settings.python, "-I", "-c", PRINT_PREFIXES]
        try:
            asked = subprocess.run(command, check=True, capture_output=True, timeout=WAIT_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{self.settings.python} could not be started: {error}") from error
        folders: list[str] = json.loads(asked.stdout)
        return sorted({os.path.realpath(folder) for folder in folders} | set(folders))


def _show(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path] if Path(path).exists() else []
