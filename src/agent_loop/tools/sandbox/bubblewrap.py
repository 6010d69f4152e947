"""Sandboxes made by bubblewrap, each with a Python started for it: slower, and it works where the direct way is
forbidden to all but bubblewrap."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

from agent_loop.errors import SandboxError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.sandbox.inside import root
from agent_loop.tools.sandbox.settings import SandboxSettings
from agent_loop.tools.sandbox.source import ENVIRONMENT, PACKAGE, SandboxSource, launch_command

PATIENCE_S = 60.0
ASK_FOLDERS = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
INSIDE = PACKAGE / "tools" / "sandbox" / "inside"


class Bubblewrap(SandboxSource):
    """Runs one `bwrap` per sandbox.

    Args:
        settings: Of all sandboxes.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self.mechanism = "bubblewrap"
        self._plan = settings.plan("bubblewrap")
        self._command: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Finds out what bubblewrap is to show."""
        program = shutil.which(self.settings.bubblewrap)
        if program is None:
            raise SandboxError(f"there is no program {self.settings.bubblewrap}; install bubblewrap")
        self._command = [program, *self._make_options()]

    async def spawn(self, control: socket.socket, *, work: str | None) -> None:
        """Starts `bwrap`."""
        self._collect()
        self._processes.append(await run_in_thread(self._popen, control))

    def is_alive(self) -> bool:
        """Always: there is nothing that sandboxes share."""
        return True

    def close(self) -> None:
        """Waits for those that are about to end."""
        for process in self._processes:
            process.wait(PATIENCE_S)
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
        options += ["--uid", str(root.USER_ID), "--gid", str(root.USER_ID), "--hostname", "sandbox"]
        options += ["--cap-drop", "ALL"]
        for path in (*root.SYSTEM_FOLDERS, *root.SYSTEM_FILES, *self._python_folders(), *self._shown()):
            options += _show(path)
        options += ["--proc", "/proc"]
        for name in root.DEVICES:
            options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        options += ["--size", str(self._plan.temp_dir_bytes), "--tmpfs", root.SANDBOX]
        for link, folder in (("/tmp", "tmp"), ("/var/tmp", "tmp"), ("/dev/shm", "shm")):
            if not any(option.startswith(f"{link}/") for option in options):
                options += ["--symlink", f"{root.SANDBOX}/{folder}", link]
        options += ["--remount-ro", "/", "--chdir", "/"]
        launch = launch_command(self.settings.python, mode="single", plan=self._plan)
        return [*options, "--", *launch]

    def _shown(self) -> list[str]:
        return [*self._plan.visible, str(INSIDE)]

    def _python_folders(self) -> list[str]:
        command = [self.settings.python, "-I", "-c", ASK_FOLDERS]
        try:
            asked = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{self.settings.python} could not be started: {error}") from error
        folders: list[str] = json.loads(asked.stdout)
        return sorted({os.path.realpath(folder) for folder in folders} | set(folders))


def _show(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path] if Path(path).exists() else []
