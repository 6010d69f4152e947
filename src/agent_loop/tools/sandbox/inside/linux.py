"""System calls that Python has no functions for, through the C library."""

from __future__ import annotations

import ctypes
import os

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522

LIBC = ctypes.CDLL(None, use_errno=True)


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
    """Return the result of a call of the C library, or raise the OSError that it reported."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
