"""Runs a command as Docker runs one in a container by default: few capabilities, no namespaces and no mounts.

PYTHONPATH=. python -m tests.tools.container USER_ID COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import os
import sys

from agent_loop.tools.sandbox.inside import linux
from agent_loop.tools.sandbox.inside.seccomp import REFUSED, RULES, load, make_program

KEPT_CAPABILITIES = 0xA80425FB
FORBIDDEN = (
    "mount",
    "umount2",
    "pivot_root",
    "unshare",
    "setns",
    "open_tree",
    "move_mount",
    "fsopen",
    "mount_setattr",
)
NO_NEW_NAMESPACES = RULES[:2]


def main() -> None:
    user_id, command = int(sys.argv[1]), sys.argv[2:]
    refused = {name: REFUSED[name] for name in FORBIDDEN}
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    load(make_program(os.uname().machine, refused=refused, rules=NO_NEW_NAMESPACES))
    if os.geteuid() == 0:
        with open("/proc/sys/kernel/cap_last_cap") as file:
            last = int(file.read())
        for capability in range(last + 1):
            if not KEPT_CAPABILITIES >> capability & 1:
                linux.prctl(linux.PR_CAPBSET_DROP, capability)
    if user_id != os.geteuid():
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
