"""Landlock: a process gives up, for good and for all it starts, every file but those named. Needs Linux 5.13, and no
privileges.

Its rules are about opening, making and removing. The names, sizes and attributes of other files can still be asked
for; the system calls that would change attributes are left to users and to the filter of system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable

from agent_loop.tools.sandbox.inside import linux

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446  # the same on all architectures
ASK_VERSION = 1
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHARACTER_DEVICE, MAKE_BLOCK_DEVICE, TRUNCATE, DEVICE_COMMANDS = 1 << 6, 1 << 11, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | DEVICE_COMMANDS
"""What can be allowed for a file that is no folder."""
NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights over files by version; 16 since the fifth."""
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
ABSTRACT_SOCKETS, SIGNALS = 1 << 0, 1 << 1
TCP_VERSION, SCOPES_VERSION = 4, 6


class RulesetAttributes(ctypes.Structure):
    """`struct landlock_ruleset_attr`."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class PathBeneath(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """What this kernel knows of Landlock; 0 where it is missing or switched off."""
    return max(0, _call(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(ASK_VERSION)))


def keep_signals_inside() -> None:
    """From here on this process and all it starts can signal each other alone. Needs version 6.

    Raises:
        OSError: The kernel refuses, as does every function below.
    """
    ruleset = _create(RulesetAttributes(scopes=SIGNALS))
    enforce(ruleset)
    os.close(ruleset)


def make_ruleset(*, version: int, shown: Iterable[str], devices: Iterable[str], work: str) -> int:
    """A descriptor of rules for `enforce`, without network and without signals to others as far as the kernel can.

    Args:
        version: Of Landlock.
        shown: Files and folders to read and execute; those that do not exist are left out.
        devices: Files to read and write.
        work: The folder where everything is allowed but making devices.
    """
    rights = (1 << NUM_RIGHTS.get(version, 16)) - 1
    attributes = RulesetAttributes(files=rights)
    if version >= TCP_VERSION:
        attributes.network = BIND_TCP | CONNECT_TCP
    if version >= SCOPES_VERSION:
        attributes.scopes = ABSTRACT_SOCKETS | SIGNALS
    ruleset = _create(attributes)
    for path in shown:
        with contextlib.suppress(FileNotFoundError):
            _allow(ruleset, path, rights=READ)
    for path in devices:
        _allow(ruleset, path, rights=READ_FILE | WRITE_FILE)
    _allow(ruleset, work, rights=rights & ~(MAKE_CHARACTER_DEVICE | MAKE_BLOCK_DEVICE))
    return ruleset


def enforce(ruleset: int) -> None:
    """Puts rules in force. The process must have given up new privileges."""
    linux.check(_call(SYS_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "landlock_restrict_self")


def _create(attributes: RulesetAttributes) -> int:
    """Kernels refuse fields that they do not know, unless they are left out or zero."""
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = _call(SYS_CREATE_RULESET, ctypes.byref(attributes), size, ctypes.c_uint(0))
    return linux.check(ruleset, "landlock_create_ruleset")


def _allow(ruleset: int, path: str, *, rights: int) -> None:
    folder_or_file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(folder_or_file).st_mode):
            rights &= OF_FILES
        rule = PathBeneath(allowed=rights, parent=folder_or_file)
        kind, flags = ctypes.c_int(RULE_PATH_BENEATH), ctypes.c_uint(0)
        result = _call(SYS_ADD_RULE, ctypes.c_int(ruleset), kind, ctypes.byref(rule), flags)
        linux.check(result, f"landlock_add_rule {path}")
    finally:
        os.close(folder_or_file)


def _call(number: int, *arguments: object) -> int:
    return int(linux.LIBC.syscall(ctypes.c_long(number), *arguments))
