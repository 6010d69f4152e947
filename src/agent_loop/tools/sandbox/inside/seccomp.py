"""Filter of system calls, which refuses those that an interpreter does not need and that attacks on a kernel use.

Everything else is allowed. Of sockets, at most those between processes of the sandbox (`AF_UNIX`) are allowed. That
blocks families that a network namespace does not cover, such as `AF_VSOCK`, and without such a namespace the whole
network.
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
    ArgumentRule,
    Numbers,
    SyscallRule,
)

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET, ARGUMENT_BYTES = 0, 4, 16, 8
MODE_FILTER = 2
X32_BIT = 0x40000000
BpfLine: TypeAlias = tuple[int, int, int, int]
"""BPF instruction: code, number of lines to skip if true, number of lines to skip if false, operand."""


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
    """Permanently filter the system calls of this process and its children. Needs no privileges.

    Args:
        shares_namespaces: Whether the sandbox shares namespaces with the host, so that sockets and messages of the host
            must be blocked here.
        shares_user: Whether the sandbox shares the agent's user, so that changing file attributes must be blocked.

    Raises:
        OSError: The kernel has no such filters, or the architecture is not one of `ARCHITECTURES`.
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


def make_program(
    machine: str, *, refused: Mapping[str, Numbers], rules: Iterable[SyscallRule]
) -> list[BpfLine]:
    """Return the program of a filter.

    Args:
        machine: One of `ARCHITECTURES`.
        refused: System calls that fail with `EPERM`.
        rules: Rules for system calls that are allowed with certain arguments.
    """
    architecture, column = ARCHITECTURES[machine]
    lines: list[BpfLine] = [
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
        checks = [line for argument in rule.arguments for line in _check(argument, error=rule.error)]
        lines += [(JUMP_EQUAL, 0, len(checks) + 1, rule.numbers[column]), *checks, (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, ALLOW)]


def load(lines: list[BpfLine]) -> None:
    """Enforce a program on this process, which must have set `PR_SET_NO_NEW_PRIVS` or have `CAP_SYS_ADMIN`.

    Raises:
        OSError: The kernel does not accept the filter.
    """
    array = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    program = Program(len(lines), array)
    zero = ctypes.c_ulong(0)
    if linux.LIBC.prctl(linux.PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.byref(program), zero, zero):
        raise OSError(ctypes.get_errno(), "the kernel does not accept a filter of system calls")


def _check(argument: ArgumentRule, *, error: int) -> list[BpfLine]:
    """Return instructions that continue after their last line if an argument matches, and else return an error.

    Only the lower 32 bits of an argument are checked.
    """
    jumps = [
        (JUMP_EQUAL, len(argument.values) - place, 0, value) for place, value in enumerate(argument.values)
    ]
    offset = ARGUMENTS_OFFSET + argument.index * ARGUMENT_BYTES
    return [(LOAD, 0, 0, offset), (AND, 0, 0, argument.mask), *jumps, (RETURN, 0, 0, ERRNO | error)]
