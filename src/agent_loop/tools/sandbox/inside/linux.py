"""System calls that Python has no functions for, through the C library."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
SYS_MOUNT_SETATTR = 442  # the same on all architectures

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522

LIBC = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    """`struct mount_attr`."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def unshare(flags: int) -> None:
    """Move this process into new namespaces; a new process id namespace applies to later children.

    Raises:
        OSError: The kernel refuses. The other functions of this module raise it too.
    """
    check(LIBC.unshare(flags), "unshare")


def mount(
    source: str, target: str, *, kind: str | None = None, flags: int = 0, options: str | None = None
) -> None:
    """Call `mount(2)`."""
    data = options.encode() if options is not None else None
    filesystem = kind.encode() if kind is not None else None
    result = LIBC.mount(os.fsencode(source), os.fsencode(target), filesystem, ctypes.c_ulong(flags), data)
    check(result, f"mount {target}")


def make_read_only(path: str, *, allow_devices: bool = False) -> None:
    """Make a mount and all mounts below it read-only, without set-uid programs. Needs Linux 5.12."""
    attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | (0 if allow_devices else MOUNT_ATTR_NODEV)
    wanted = MountAttributes(attr_set=attributes)
    result = LIBC.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_int(AT_FDCWD),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_uint(AT_RECURSIVE),
        ctypes.byref(wanted),
        ctypes.c_size_t(ctypes.sizeof(wanted)),
    )
    check(result, f"mount_setattr {path}")


def detach(target: str) -> None:
    """Detach a mount and all mounts below it."""
    check(LIBC.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, *, old_root: str) -> None:
    """Call `pivot_root(2)`."""
    check(LIBC.pivot_root(os.fsencode(new_root), os.fsencode(old_root)), "pivot_root")


def prctl(option: int, argument: int = 0) -> None:
    """Call `prctl(2)` for options with one argument."""
    zero = ctypes.c_ulong(0)
    check(LIBC.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


def empty_bounding_set() -> None:
    """Permanently drop the capabilities that a program could grant. Does nothing without the right to do so."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return  # past the last capability, or not permitted


def drop_capabilities() -> None:
    """Permanently drop all capabilities."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    empty_bounding_set()
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def check(result: int, name: str) -> int:
    """Return the result of a call of the C library.

    Raises:
        OSError: The call failed.
    """
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
