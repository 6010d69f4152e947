"""The system calls that sandboxes do without, by their numbers on x86_64 and aarch64."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from typing import TypeAlias

Numbers: TypeAlias = tuple[int, int]
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of the architecture, and its column in the tables below."""
ABSENT = 0xFFFFFFFF
"""Aarch64 has no such call."""

ALWAYS_REFUSED: dict[str, Numbers] = {
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
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
SHARED_WITH_THE_HOST: dict[str, Numbers] = {
    # what others made, which namespaces would put out of sight
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "semctl": (66, 191),
    "mq_unlink": (241, 181),
    # files that Landlock does not speak of, or not in its first versions
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
"""Attributes of files, which their owner may change without opening them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What an argument must be."""

    place: int
    """Counted from 0."""
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    """The bits that are looked at."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A system call that is let through if its arguments are as demanded."""

    numbers: Numbers
    demands: tuple[Demand, ...]
    error: int = errno.EPERM
    """Otherwise."""


ALL_NAMESPACES = 0x7E020000
NEVER = Demand(0, ())
UNIX = Demand(0, (socket.AF_UNIX,))
CONNECTED = Demand(1, (socket.SOCK_STREAM, socket.SOCK_SEQPACKET), mask=0xF)
"""Of a pair; datagrams could be sent to any other socket of this machine."""
ITSELF = Demand(0, (0,))
OWN_PRIORITY = (Demand(0, (0, 1)), Demand(1, (0,)))
"""Of this process or its group, not of its user, who may be the supervisor's."""
OWN_DISK_PRIORITY = (Demand(0, (1, 2)), Demand(1, (0,)))
TRUNCATION = os.O_ACCMODE | os.O_TRUNC
NO_HIDDEN_TRUNCATION = tuple(
    mode | truncation for mode in range(4) for truncation in (0, os.O_TRUNC) if mode or not truncation
)
"""Opening to read can truncate, and Landlock looks at that since its third version alone."""

ALWAYS_RULED = (
    Rule((56, 220), (Demand(0, (0,), mask=ALL_NAMESPACES),)),  # clone
    Rule(
        (435, 435), (NEVER,), error=errno.ENOSYS
    ),  # clone3, whose flags are out of sight: libraries use clone
    Rule((302, 261), (ITSELF,)),  # prlimit64
    Rule((142, 118), (ITSELF,)),  # sched_setparam
    Rule((144, 119), (ITSELF,)),  # sched_setscheduler
    Rule((203, 122), (ITSELF,)),  # sched_setaffinity
    Rule((314, 274), (ITSELF,)),  # sched_setattr
    Rule((141, 140), OWN_PRIORITY),  # setpriority
    Rule((251, 30), OWN_DISK_PRIORITY),  # ioprio_set
)
SOCKETS_APART = (
    Rule((41, 198), (UNIX,), error=errno.ENETUNREACH),  # socket
    Rule((53, 199), (UNIX,), error=errno.ENETUNREACH),  # socketpair
)
SHARED_RULES = (
    Rule((41, 198), (NEVER,), error=errno.ENETUNREACH),  # socket
    Rule((53, 199), (UNIX, CONNECTED), error=errno.ENETUNREACH),  # socketpair
    Rule((2, ABSENT), (Demand(1, NO_HIDDEN_TRUNCATION, mask=TRUNCATION),)),  # open
    Rule((257, 56), (Demand(2, NO_HIDDEN_TRUNCATION, mask=TRUNCATION),)),  # openat
    Rule((437, 437), (NEVER,), error=errno.ENOSYS),  # openat2, whose flags are out of sight
)
