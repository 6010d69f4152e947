"""A filter of system calls: what an interpreter has no use for and attacks on a kernel begin with is refused.

Everything else is let through. Of sockets, at most those between processes of the sandbox (`AF_UNIX`) are; that closes
families that a network namespace does not cover, such as `AF_VSOCK`, and where there is none, all of the network.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from agent_loop.tools.sandbox.inside import linux
from agent_loop.tools.sandbox.inside.syscalls import (
    ALWAYS_REFUSED,
    ALWAYS_RULED,
    ARCHITECTURES,
    OF_OWNERS,
    SHARED_RULES,
    SHARED_WITH_THE_HOST,
    SOCKETS_APART,
    Demand,
    Numbers,
    Rule,
)

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET, ARGUMENT_BYTES = 0, 4, 16, 8
MODE_FILTER = 2
X32_BIT = 0x40000000
Line: TypeAlias = tuple[int, int, int, int]
"""Code, lines to skip if true, lines to skip if false, operand."""


class Instruction(ctypes.Structure):
    """`struct sock_filter`."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jump_if_true", ctypes.c_uint8),
        ("jump_if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction)))


def install_filter(*, shares_namespaces: bool = False, shares_user: bool = False) -> None:
    """Filters the system calls of this process and all it starts, for good. Needs no privileges.

    Args:
        shares_namespaces: The host's sockets and messages are in sight, and must be put out of reach here.
        shares_user: The agent's files belong to the sandbox's user; attributes of files are left as they are.

    Raises:
        OSError: The kernel has no such filters, or the architecture is another than `ARCHITECTURES`.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    refused = dict(ALWAYS_REFUSED)
    if shares_namespaces:
        refused |= SHARED_WITH_THE_HOST
    if shares_user:
        refused |= OF_OWNERS
    rules = [*ALWAYS_RULED, *(SHARED_RULES if shares_namespaces else SOCKETS_APART)]
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    load(make_program(machine, refused=refused, rules=rules))


def make_program(machine: str, *, refused: Mapping[str, Numbers], rules: Iterable[Rule]) -> list[Line]:
    """The filter's program.

    Args:
        machine: One of `ARCHITECTURES`.
        refused: System calls that fail with `EPERM`.
        rules: Those that depend on their arguments.
    """
    architecture, column = ARCHITECTURES[machine]
    lines: list[Line] = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
        (JUMP_AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    for numbers in refused.values():
        lines += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    for rule in rules:
        checks = [line for demand in rule.demands for line in _check(demand, error=rule.error)]
        lines += [(JUMP_EQUAL, 0, len(checks) + 1, rule.numbers[column]), *checks, (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, ALLOW)]


def load(lines: list[Line]) -> None:
    """Puts a program in force, which takes no new privileges or the right to administer.

    Raises:
        OSError: The kernel takes none.
    """
    array = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    program = Program(len(lines), array)
    zero = ctypes.c_ulong(0)
    if linux.LIBC.prctl(linux.PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.byref(program), zero, zero):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def _check(demand: Demand, *, error: int) -> list[Line]:
    """Goes on behind its last line if the demand is met; only the lower half of an argument is looked at."""
    jumps = [(JUMP_EQUAL, len(demand.values) - place, 0, value) for place, value in enumerate(demand.values)]
    offset = ARGUMENTS_OFFSET + demand.place * ARGUMENT_BYTES
    return [(LOAD, 0, 0, offset), (AND, 0, 0, demand.mask), *jumps, (RETURN, 0, 0, ERRNO | error)]
