"""Entry point of the sandbox's Python, which becomes the zygote or the supervisor of one sandbox.

Standard input is a socket to the agent's process. The command line contains the mode and the spec.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from agent_loop.tools.sandbox.inside import linux, socket_messages
from agent_loop.tools.sandbox.inside.files import make_work_folders
from agent_loop.tools.sandbox.inside.root_filesystem import SANDBOX, enter_new_root
from agent_loop.tools.sandbox.inside.setup import supervise, write_user_map
from agent_loop.tools.sandbox.inside.spec import SandboxSpec
from agent_loop.tools.sandbox.inside.zygote import Zygote

NICENESS = 10
"""Niceness of sandboxes, so that the agent's process has priority."""
UMASK = 0o022
"""Umask that is independent of the agent's, since the sandbox's user must be able to read the new root."""


def main() -> None:
    """Run the mode that the command line names."""
    channel = _take_standard_input()
    mode, spec = sys.argv[1], SandboxSpec(**json.loads(sys.argv[2]))
    os.nice(NICENESS)
    os.umask(UMASK)
    if mode == "single":
        make_work_folders(SANDBOX)
        _preload(spec)
        supervise(channel, spec=spec, work=SANDBOX)
        return
    try:
        user_namespaces = _enter_namespaces() if spec.namespaces else False
    except OSError as error:
        socket_messages.send(channel, {"error": str(error)})
        return
    if spec.namespaces and (zygote := os.fork()) != 0:
        channel.close()
        os.waitpid(zygote, 0)
        return
    _become_zygote(channel, spec=spec, user_namespaces=user_namespaces)


def _become_zygote(channel: socket.socket, *, spec: SandboxSpec, user_namespaces: bool) -> None:
    try:
        if spec.namespaces:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            enter_new_root(spec.visible)
        _preload(spec)
    except Exception as error:  # noqa: BLE001  (start boundary: reported to the agent)
        socket_messages.send(channel, {"error": f"{type(error).__name__}: {error}"})
        return
    socket_messages.send(channel, {"ready": True})
    Zygote(channel, spec=spec, user_namespaces=user_namespaces).serve()


def _enter_namespaces() -> bool:
    """Enter the zygote's own namespaces. Return whether sandboxes can have user namespaces.

    Raises:
        OSError: The kernel refuses.
    """
    user_id = os.geteuid()
    if user_id == 0:
        user_namespaces = _can_make_user_namespaces()
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
        return user_namespaces
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID)
    write_user_map(os.getpid(), host_id=user_id, inside_id=user_id)
    return True


def _can_make_user_namespaces() -> bool:
    """Return whether a child process can create and use a user namespace.

    Some systems allow the creation and then forbid everything inside.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _preload(spec: SandboxSpec) -> None:
    for name in spec.preload:
        __import__(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            "a preloaded module started threads, which are lost in a fork; remove the module from preload"
        )


def _take_standard_input() -> socket.socket:
    """Return the socket under another descriptor, and replace standard input by `/dev/null`."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    return channel
