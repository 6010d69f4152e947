"""Finds out what a sandbox shuts in, by trying to get out of one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Generator, Mapping
from typing import Any
from uuid import uuid4

from agent_loop.errors import SandboxError
from agent_loop.tools.sandbox.isolation import Isolation
from agent_loop.tools.sandbox.sandbox import open_sandbox
from agent_loop.tools.sandbox.source import SandboxSource

NAMESPACES = ("mnt", "net", "pid", "ipc", "uts", "user")
ATTEMPTS = """
import json, os, resource, socket
import colorsys  # of Python's own modules, one that is not loaded yet: they must be readable

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

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
home = os.statvfs(os.environ["HOME"])
facts = {
    "reads": works(open, SECRET),
    "writes": works(write, "/agent-loop-probe") or works(write, SECRET),
    "reaches_tcp": works(connect, socket.AF_INET, ("127.0.0.1", PORT)),
    "reaches_unix": works(connect, socket.AF_UNIX, "\\0" + NAME),
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in NAMESPACES},
    "capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapBnd"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "filter": int(status["Seccomp"]),
    "writable_bytes": home.f_blocks * home.f_frsize,
    "limits": [
        resource.getrlimit(limit)[0]
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    ],
}
print(json.dumps(facts))
"""


async def probe_isolation(source: SandboxSource) -> Isolation:
    """Runs one sandbox and tries what it must not be able to do.

    Raises:
        SandboxError: It could not be run.
    """
    name = uuid4().hex
    with tempfile.NamedTemporaryFile(prefix="agent-loop-probe-") as secret, _listening(name) as port:
        os.chmod(secret.name, 0o666)
        given = {"SECRET": secret.name, "PORT": port, "NAME": name, "NAMESPACES": NAMESPACES}
        preamble = "".join(f"{key} = {value!r}\n" for key, value in given.items())
        sandbox = await open_sandbox(source)
        try:
            reply = await sandbox.run(preamble + ATTEMPTS)
            host_user = sandbox.host_user()
        finally:
            await sandbox.close()
    if reply.ending != "done":
        raise SandboxError(f"the probe of the sandbox failed: {reply.end_cause} {reply.output.strip()}")
    return judge(json.loads(reply.output), host_user=host_user, source=source)


def judge(facts: Mapping[str, Any], *, host_user: int, source: SandboxSource) -> Isolation:
    """What the attempts show.

    Args:
        facts: What they printed.
        host_user: Who the sandbox's processes are for the host.
        source: Where the sandbox came from.
    """
    own = {name: facts["namespaces"][name] != os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    plan = source.settings.plan(namespaces=True)
    wanted = [plan.memory_bytes, plan.cpu_seconds, plan.max_processes, plan.max_file_bytes]
    return Isolation(
        mechanism=source.mechanism,
        files=own["mnt"] and not facts["reads"] and not facts["writes"],
        network=own["net"] and not facts["reaches_tcp"] and not facts["reaches_unix"],
        processes=own["pid"],
        privileges=facts["capabilities"] == 0 and facts["no_new_privileges"] == 1,
        own_user=host_user != os.geteuid(),
        system_calls=facts["filter"] == 2,
        temp_dir_size=facts["writable_bytes"] <= plan.temp_dir_bytes,
        limits=host_user != 0  # the kernel counts no processes of root
        and all(0 <= found <= limit for found, limit in zip(facts["limits"], wanted, strict=True)),
    )


@contextlib.contextmanager
def _listening(name: str) -> Generator[int]:
    """Sockets that a sandbox must not reach: TCP on a port, which is returned, and an abstract one by name."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        yield tcp.getsockname()[1]
