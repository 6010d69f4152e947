"""A filter of system calls: what an interpreter has no use for and attacks on a kernel begin with is refused.

Everything else is let through. Sockets are those between processes of the sandbox (`AF_UNIX`); that closes families
that a network namespace does not cover, such as `AF_VSOCK`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket

from agent_loop.tools.sandbox.inside import linux

LOAD, JUMP_EQUAL, JUMP_ANY_BIT, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENT_OFFSET = 0, 4, 16
MODE_FILTER = 2
ALL_NAMESPACES = 0x7E020000

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of the architecture, and its column in the tables below."""
X32_BIT = 0x40000000

REFUSED = {
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
    # memory that no limit below counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (180, 180),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
SOCKET = (41, 198)
SOCKETPAIR = (53, 199)
PRLIMIT = (302, 261)


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


def install_filter() -> None:
    """Filters the system calls of this process and all it starts, for good. Needs no privileges.

    Raises:
        OSError: The kernel has no such filters, or the architecture is another than `ARCHITECTURES`.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    lines = _program(*ARCHITECTURES[machine])
    array = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    program = Program(len(lines), array)
    zero = ctypes.c_ulong(0)
    if linux.LIBC.prctl(linux.PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.byref(program), zero, zero):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def _program(architecture: int, column: int) -> list[tuple[int, int, int, int]]:
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
        (JUMP_AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    for numbers in REFUSED.values():
        lines += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    lines += [(JUMP_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    lines += [
        (JUMP_EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, ARGUMENT_OFFSET),
        (JUMP_ANY_BIT, 0, 1, ALL_NAMESPACES),
        (RETURN, 0, 0, ERRNO | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    for numbers, allowed_argument, fault in (
        (SOCKET, socket.AF_UNIX, errno.ENETUNREACH),
        (SOCKETPAIR, socket.AF_UNIX, errno.ENETUNREACH),
        (PRLIMIT, 0, errno.EPERM),  # of this process, not of the supervisor
    ):
        lines += [
            (JUMP_EQUAL, 0, 4, numbers[column]),
            (LOAD, 0, 0, ARGUMENT_OFFSET),
            (JUMP_EQUAL, 0, 1, allowed_argument),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, ERRNO | fault),
        ]
    return [*lines, (RETURN, 0, 0, ALLOW)]
