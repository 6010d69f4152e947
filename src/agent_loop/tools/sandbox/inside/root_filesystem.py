"""Root file system of sandboxes: the system's programs, Python and the visible paths, all read-only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from agent_loop.tools.sandbox.inside import linux

SANDBOX = "/sandbox"
"""The only writable folder, which is a separate file system in each sandbox."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/alternatives",
)
DEVICES = ("null", "zero", "full", "random", "urandom")
USER_ID = 1000
"""User id inside a sandbox."""
ACCOUNTS = {
    "/etc/passwd": f"sandbox:x:{USER_ID}:{USER_ID}::{SANDBOX}/home:/bin/sh\n",
    "/etc/group": f"sandbox:x:{USER_ID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
STAGE = "/tmp"
"""Folder in which the new root is assembled. The host's folder of that name stays reachable as `/host/tmp`."""


def shown_paths(visible: Iterable[str]) -> list[str]:
    """Return all visible paths except the devices."""
    return [*SYSTEM_FOLDERS, *SYSTEM_FILES, *python_folders(), *visible]


def python_folders() -> list[str]:
    """Return the folders of this Python and its packages."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return sorted({os.path.realpath(folder) for folder in folders} | folders)


def enter_new_root(visible: Iterable[str]) -> None:
    """Assemble the file system and make it the root of this process, which must have its own mount namespace.

    Raises:
        OSError: The kernel refuses, or a path is missing.
    """
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", STAGE, kind="tmpfs", flags=linux.MS_NOSUID | linux.MS_NODEV, options="mode=0755")
    os.mkdir(f"{STAGE}/host")
    os.mkdir(f"{STAGE}/root")
    linux.pivot_root(STAGE, old_root=f"{STAGE}/host")
    os.chdir("/")
    linux.mount("tmpfs", "/root", kind="tmpfs", flags=linux.MS_NOSUID | linux.MS_NODEV, options="mode=0755")
    _fill("/root", host="/host", visible=visible)
    mount_processes(
        "/root/proc"
    )  # while the host's is in sight, or the kernel would refuse users without privileges
    linux.detach("/host")
    os.chdir("/root")
    linux.pivot_root(".", old_root=".")
    linux.detach(".")
    os.chdir("/")


def mount_processes(target: str = "/proc") -> None:
    """Mount the `/proc` of this process id namespace.

    Raises:
        OSError: The kernel refuses, as it does in containers that hide parts of their own `/proc`.
    """
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", target, kind="proc", flags=flags)


def mount_sandbox(max_bytes: int) -> None:
    """Mount an empty file system at `SANDBOX`, which disappears with the mount namespace of this process."""
    options = f"mode=0755,size={max_bytes},nr_inodes={max(1024, max_bytes // 4096)}"
    linux.mount("tmpfs", SANDBOX, kind="tmpfs", flags=linux.MS_NOSUID | linux.MS_NODEV, options=options)


def _fill(root: str, *, host: str, visible: Iterable[str]) -> None:
    for folder in ("dev", "etc", "proc", SANDBOX.lstrip("/")):
        os.mkdir(f"{root}/{folder}")
    for path, text in ACCOUNTS.items():
        with open(root + path, "w") as file:
            file.write(text)
    system = (*SYSTEM_FOLDERS, *SYSTEM_FILES)
    shown = {path for path in shown_paths(visible) if path not in system or os.path.lexists(host + path)}
    for path in sorted(shown, key=len):
        _show(path, root=root, host=host)
    for name in DEVICES:
        _bind(f"{host}/dev/{name}", f"{root}/dev/{name}")
    for link, folder in (("/tmp", "tmp"), ("/var/tmp", "tmp"), ("/dev/shm", "shm")):
        if not os.path.lexists(root + link):
            os.makedirs(os.path.dirname(root + link), exist_ok=True)
            os.symlink(f"{SANDBOX}/{folder}", root + link)
    linux.make_read_only(root, allow_devices=True)


def _show(path: str, *, root: str, host: str) -> None:
    """Make a path of the host visible. Links are copied as links, so that `/bin -> usr/bin` keeps its target."""
    target = root + path
    if os.path.lexists(target):
        return  # a parent folder is already visible
    if not os.path.lexists(host + path):
        raise FileNotFoundError(f"{path} does not exist; it cannot be made visible")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(host + path):
        os.symlink(os.readlink(host + path), target)
    else:
        _bind(host + path, target)
        linux.make_read_only(target)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o644))
    linux.mount(source, target, flags=linux.MS_BIND | linux.MS_REC)
