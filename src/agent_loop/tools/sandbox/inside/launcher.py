"""Where the sandbox's Python begins: enters the namespaces and becomes the zygote, or the supervisor of one sandbox.

Standard input is a socket to the agent's process. The command line holds the mode and the plan.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from agent_loop.tools.sandbox.inside import linux, wire
from agent_loop.tools.sandbox.inside.files import make_work_folders
from agent_loop.tools.sandbox.inside.newborn import supervise, write_user_map
from agent_loop.tools.sandbox.inside.plan import Plan
from agent_loop.tools.sandbox.inside.root import SANDBOX, enter_new_root
from agent_loop.tools.sandbox.inside.zygote import Zygote

NICENESS = 10
"""The agent's own process goes first."""
UMASK = 0o022
"""Whatever the agent's is: what is shown must be readable by the sandbox's user."""


def main() -> None:
    """Runs the mode that the command line names."""
    channel = _take_standard_input()
    mode, plan = sys.argv[1], Plan(**json.loads(sys.argv[2]))
    os.nice(NICENESS)
    os.umask(UMASK)
    if mode == "single":
        make_work_folders(SANDBOX)
        _preload(plan)
        supervise(channel, plan=plan, work=SANDBOX)
        return
    try:
        user_namespaces = _enter_namespaces() if plan.namespaces else False
    except OSError as error:
        wire.send(channel, {"error": str(error)})
        return
    if plan.namespaces and (zygote := os.fork()) != 0:
        channel.close()
        os.waitpid(zygote, 0)
        return
    _become_zygote(channel, plan=plan, user_namespaces=user_namespaces)


def _become_zygote(channel: socket.socket, *, plan: Plan, user_namespaces: bool) -> None:
    try:
        if plan.namespaces:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            enter_new_root(plan.visible)
        _preload(plan)
    except Exception as error:  # noqa: BLE001  (start boundary: told to the agent)
        wire.send(channel, {"error": f"{type(error).__name__}: {error}"})
        return
    wire.send(channel, {"ready": True})
    Zygote(channel, plan=plan, user_namespaces=user_namespaces).serve()


def _enter_namespaces() -> bool:
    """Enters the zygote's own namespaces. True if sandboxes can have user namespaces.

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
    """Tries it in a process of its own; some systems let them be made and then forbid everything in them."""
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


def _preload(plan: Plan) -> None:
    for name in plan.preload:
        __import__(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(
            "a preloaded module started threads, which no fork survives; take it out of preload"
        )


def _take_standard_input() -> socket.socket:
    """The socket, moved away from where it would pass for standard input."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    return channel
