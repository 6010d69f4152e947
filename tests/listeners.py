"""Addresses at which a process and its children accept TCP connections, read from /proc."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

LISTEN_STATE = "0A"


def is_loopback(address: IPv4Address | IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def listening_addresses(pids: Iterable[int]) -> list[IPv4Address | IPv6Address]:
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return [
        _read_address(fields[1].partition(":")[0])
        for table in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
        if fields[3] == LISTEN_STATE and fields[9] in inodes
    ]


def process_tree(pid: int) -> list[int]:
    """Return the ids of the process and of all its descendants."""
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        children = []
    return [pid, *(each for child in children for each in process_tree(child))]


def _socket_inodes(pid: int) -> list[str]:
    inodes: list[str] = []
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []
    for descriptor in descriptors:
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.append(target.removeprefix("socket:[").removesuffix("]"))
    return inodes


def _read_address(text: str) -> IPv4Address | IPv6Address:
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    return ip_address(socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed))
