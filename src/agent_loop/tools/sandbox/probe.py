"""Measurement of a sandbox's isolation, by attempting to escape from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from agent_loop.errors import ConfigError, SandboxError
from agent_loop.tools.sandbox.sandbox import open_sandbox
from agent_loop.tools.sandbox.settings import SandboxSettings

ATTEMPTS = """
import json, os, resource, socket
import colorsys  # a module of the standard library that is not loaded yet, to test that it can be read

def works(function, *arguments):
    try:
        function(*arguments)
    except OSError:
        return False
    return True

def connect(family, address):
    with socket.socket(family) as end:
        end.settimeout(2)
        end.connect(address)

def write(path):
    with open(path, "w"):
        pass

limits = resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE
print(json.dumps({
    "reads files of the host": works(open, SECRET),
    "writes files of the host": works(write, "/agent-loop-probe") or works(write, SECRET),
    "reaches the network": works(connect, socket.AF_INET, ("127.0.0.1", PORT)),
    "reaches sockets of the host": works(connect, socket.AF_UNIX, "\\0" + NAME) or works(connect, socket.AF_UNIX, PATH),
    "signals processes of the host": works(os.kill, AGENT, 0),
    "inspects processes of the host": works(open, f"/proc/{AGENT}/cmdline"),
    "gains privileges": works(os.setgroups, [0]),
    "allocates hidden memory": works(os.memfd_create, "probe"),
    "has no limits": any(resource.getrlimit(limit)[0] == resource.RLIM_INFINITY for limit in limits),
}))
"""


def check_isolation(settings: SandboxSettings) -> None:
    """Check that sandboxes start and that code in them cannot escape."""
    try:
        with ThreadPoolExecutor(1) as thread:  # the caller may itself run in an event loop
            escapes = thread.submit(asyncio.run, find_escapes(settings)).result()
    except (OSError, SandboxError) as error:
        raise ConfigError(f"the python tool does not work on this machine: {error}") from error
    if escapes and not settings.allow_weaker_isolation:
        raise ConfigError(
            f"code of the python tool {', '.join(escapes)}; set allow_weaker_isolation: true if you trust the code"
        )


async def find_escapes(settings: SandboxSettings) -> list[str]:
    """Return what code in a sandbox can do that it must not. One sandbox attempts everything."""
    with tempfile.TemporaryDirectory(prefix="agent-loop-probe-") as folder, _listening(folder) as given:
        preamble = "".join(f"{key} = {value!r}\n" for key, value in given.items())
        sandbox = await open_sandbox(settings)
        try:
            reply = await sandbox.run(preamble + ATTEMPTS)
        finally:
            await sandbox.close()
    if reply.ending != "done":
        raise SandboxError(
            f"the probe of the sandbox failed: {reply.exit_cause or reply.ending} {reply.output.strip()}"
        )
    return [attempt for attempt, works in json.loads(reply.output).items() if works]


@contextlib.contextmanager
def _listening(folder: str) -> Generator[dict[str, Any]]:
    """Provide what a sandbox must not reach, open to all users of this machine."""
    name, secret, path = uuid4().hex, f"{folder}/secret", f"{folder}/socket"
    with (
        open(secret, "w"),
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as by_name,
        socket.socket(socket.AF_UNIX) as by_path,
    ):
        by_name.bind(f"\0{name}")
        by_path.bind(path)
        for listener in (by_name, by_path):
            listener.listen()
        os.chmod(folder, 0o755)
        for shared in (secret, path):
            os.chmod(shared, 0o666)
        yield {
            "SECRET": secret,
            "PORT": tcp.getsockname()[1],
            "NAME": name,
            "PATH": path,
            "AGENT": os.getpid(),
        }
