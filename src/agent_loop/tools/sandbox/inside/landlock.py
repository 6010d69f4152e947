"""Landlock: a process permanently gives up access to all files except the given ones, for itself and its children.

Landlock needs Linux 5.13 and no privileges. Its rules cover opening, creating and removing files. The names, sizes and
attributes of other files can still be read. Changing attributes is restricted by the user and by the filter of system
calls.
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
"""Rights that apply to files that are not folders."""
NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights by version; 16 since the fifth."""
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
    """Return this kernel's version of Landlock, or 0 if Landlock is missing or disabled."""
    return max(0, _call(SYS_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(ASK_VERSION)))


def keep_signals_inside() -> None:
    """Restrict signals of this process and its children to each other. Needs version 6."""
    ruleset = _create(RulesetAttributes(scopes=SIGNALS))
    enforce(ruleset)
    os.close(ruleset)


def make_ruleset(*, version: int, shown: Iterable[str], devices: Iterable[str], work: str) -> int:
    """Return a descriptor of rules for `enforce`, which also restrict network and signals if the kernel supports it.

    Args:
        version: The kernel's version of Landlock.
        shown: Files and folders that can be read and executed; missing ones are ignored.
        devices: Files that can be read and written.
        work: The folder in which everything is allowed except creating devices.
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
    """Enforce rules on this process, which must have set `PR_SET_NO_NEW_PRIVS`."""
    linux.check(_call(SYS_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0)), "landlock_restrict_self")


def _create(attributes: RulesetAttributes) -> int:
    """Create a ruleset. Kernels refuse fields that they do not know, unless the fields are zero."""
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
