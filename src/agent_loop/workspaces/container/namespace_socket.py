"""A socket that listens in the network namespace of another process. Also runs as a program, without the package.

As a program: `python namespace_socket.py PID PORT`, with a Unix socket as standard input, over which the listening
socket is sent.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

CLONE_NEWNET = 0x40000000


def listen_in_namespace(pid: int, port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface in the namespace of a process.

    The calling thread moves into the namespace and stays there, so it must end afterwards.

    Raises:
        OSError: The process has ended, the rights are missing, or the port is taken.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
    finally:
        os.close(descriptor)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def main() -> None:
    """Create the socket and send it over standard input."""
    with (
        listen_in_namespace(int(sys.argv[1]), int(sys.argv[2])) as listener,
        socket.socket(fileno=0) as control,
    ):
        socket.send_fds(control, [b"."], [listener.fileno()])


if __name__ == "__main__":
    main()
