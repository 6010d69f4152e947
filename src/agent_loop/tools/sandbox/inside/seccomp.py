"""Filter of system calls, which refuses those that an interpreter does not need and that attacks on a kernel use.

Everything else is allowed. Of sockets, only connected pairs of `AF_UNIX` are allowed, which blocks the whole network.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from agent_loop.tools.sandbox.inside import linux

Numbers: TypeAlias = tuple[int, int]
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of the architecture, and its column in the tables below."""
ABSENT = 0xFFFFFFFF
"""Number of a call that aarch64 does not have."""

REFUSED: dict[str, Numbers] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "vmsplice": (278, 75),
    # memory that is not counted by any limit
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # objects of other processes
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_unlink": (241, 181),
    # operations on files that Landlock does not restrict, or not in its first versions
    "truncate": (76, 45),
    "inotify_init": (253, ABSENT),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
}
OF_OWNERS: dict[str, Numbers] = {
    "chmod": (90, ABSENT),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, ABSENT),
    "fchown": (93, 55),
    "lchown": (94, ABSENT),
    "fchownat": (260, 54),
    "utime": (132, ABSENT),
    "utimes": (235, ABSENT),
    "futimesat": (261, ABSENT),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""Calls that change attributes of files, which the owner may do without opening them."""


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """Allowed values of one argument of a system call."""

    index: int
    """Index of the argument, from 0."""
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    """Bits of the argument that are compared."""


@dataclass(frozen=True, slots=True)
class SyscallRule:
    """System call that is allowed if its arguments have the given values."""

    numbers: Numbers
    arguments: tuple[ArgumentRule, ...]
    error: int = errno.EPERM
    """Error of the call with other arguments."""


ALL_NAMESPACES = 0x7E020000
NEVER = ArgumentRule(0, ())
UNIX = ArgumentRule(0, (socket.AF_UNIX,))
CONNECTED = ArgumentRule(1, (socket.SOCK_STREAM, socket.SOCK_SEQPACKET), mask=0xF)
"""Connected types of a socket pair. Datagrams could be sent to any other socket of this machine."""
ITSELF = ArgumentRule(0, (0,))
OWN_PRIORITY = (ArgumentRule(0, (0, 1)), ArgumentRule(1, (0,)))
"""Priority of this process or its group, but not of its user, who may also run the supervisor."""
OWN_DISK_PRIORITY = (ArgumentRule(0, (1, 2)), ArgumentRule(1, (0,)))
TRUNCATION = os.O_ACCMODE | os.O_TRUNC
NO_HIDDEN_TRUNCATION = tuple(
    mode | truncation for mode in range(4) for truncation in (0, os.O_TRUNC) if mode or not truncation
)
"""Open modes without `O_TRUNC` for reading, which truncates the file. Landlock restricts that since version 3."""

RULES = (
    SyscallRule((56, 220), (ArgumentRule(0, (0,), mask=ALL_NAMESPACES),)),  # clone
    SyscallRule(
        (435, 435), (NEVER,), error=errno.ENOSYS
    ),  # clone3, whose flags a filter cannot read; libraries fall back to clone
    SyscallRule((302, 261), (ITSELF,)),  # prlimit64
    SyscallRule((142, 118), (ITSELF,)),  # sched_setparam
    SyscallRule((144, 119), (ITSELF,)),  # sched_setscheduler
    SyscallRule((203, 122), (ITSELF,)),  # sched_setaffinity
    SyscallRule((314, 274), (ITSELF,)),  # sched_setattr
    SyscallRule((141, 140), OWN_PRIORITY),  # setpriority
    SyscallRule((251, 30), OWN_DISK_PRIORITY),  # ioprio_set
    SyscallRule((41, 198), (NEVER,), error=errno.ENETUNREACH),  # socket
    SyscallRule((53, 199), (UNIX, CONNECTED), error=errno.ENETUNREACH),  # socketpair
    SyscallRule((2, ABSENT), (ArgumentRule(1, NO_HIDDEN_TRUNCATION, mask=TRUNCATION),)),  # open
    SyscallRule((257, 56), (ArgumentRule(2, NO_HIDDEN_TRUNCATION, mask=TRUNCATION),)),  # openat
    SyscallRule((437, 437), (NEVER,), error=errno.ENOSYS),  # openat2, whose flags a filter cannot read
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


def install_filter(*, shares_user: bool) -> None:
    """Permanently filter the system calls of this process and its children. Needs no privileges."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    load(make_program(machine, refused=REFUSED | OF_OWNERS if shares_user else REFUSED, rules=RULES))


def make_program(
    machine: str, *, refused: Mapping[str, Numbers], rules: Iterable[SyscallRule]
) -> list[BpfLine]:
    """Return the program of a filter."""
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
    """Enforce a program on this process, which must have set `PR_SET_NO_NEW_PRIVS` or have `CAP_SYS_ADMIN`."""
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
