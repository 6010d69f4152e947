"""Finds out what a sandbox shuts in, by trying to get out of one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Generator, Mapping
from typing import Any
from uuid import uuid4

from agent_loop.errors import SandboxError
from agent_loop.tools.sandbox.isolation import Isolation
from agent_loop.tools.sandbox.sandbox import open_sandbox
from agent_loop.tools.sandbox.source import SandboxSource

NAMESPACES = ("mnt", "net", "pid")
CAPABILITIES = ("CapEff", "CapPrm", "CapInh", "CapAmb")
"""Those of the bounding set are out of reach without new privileges."""
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

home = os.statvfs(os.environ["HOME"])
facts = {
    "reads": works(open, SECRET),
    "writes": works(write, "/agent-loop-probe") or works(write, SECRET),
    "reaches_tcp": works(connect, socket.AF_INET, ("127.0.0.1", PORT)),
    "reaches_unix": works(connect, socket.AF_UNIX, "\\0" + NAME) or works(connect, socket.AF_UNIX, PATH),
    "signals": works(os.kill, AGENT, 0),
    "looks_into": works(open, f"/proc/{AGENT}/cmdline"),
    "makes_hidden_memory": works(os.memfd_create, "probe"),
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in NAMESPACES},
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
    with tempfile.TemporaryDirectory(prefix="agent-loop-probe-") as folder, _listening(folder) as given:
        preamble = "".join(f"{key} = {value!r}\n" for key, value in given.items())
        sandbox = await open_sandbox(source)
        try:
            reply = await sandbox.run(preamble + ATTEMPTS)
            status = sandbox.host_status()
        finally:
            await sandbox.close()
    if reply.ending != "done":
        raise SandboxError(
            f"the probe of the sandbox failed: {reply.end_cause or reply.ending} {reply.output.strip()}"
        )
    return judge(json.loads(reply.output), status=status, source=source)


def judge(facts: Mapping[str, Any], *, status: Mapping[str, str], source: SandboxSource) -> Isolation:
    """What the attempts show.

    Args:
        facts: What they printed.
        status: What the host knows of the sandbox's processes.
        source: Where the sandbox came from.
    """
    own = {name: facts["namespaces"][name] != os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    has_landlock = source.mechanism == "landlock"
    plan = source.settings.plan(source.mechanism)
    host_user = int(status["Uid"].split()[0])
    max_processes = plan.max_processes if plan.has_own_user else sys.maxsize  # the supervisor counts them
    wanted = [plan.memory_bytes, plan.cpu_seconds, max_processes, plan.max_file_bytes]
    return Isolation(
        mechanism=source.mechanism,
        files=(own["mnt"] or has_landlock) and not facts["reads"] and not facts["writes"],
        network=(own["net"] or has_landlock) and not facts["reaches_tcp"] and not facts["reaches_unix"],
        processes=own["pid"] or (has_landlock and not facts["signals"] and not facts["looks_into"]),
        privileges=not any(int(status[name], 16) for name in CAPABILITIES) and status["NoNewPrivs"] == "1",
        limits=host_user != 0  # the kernel counts no processes of root
        and all(0 <= found <= limit for found, limit in zip(facts["limits"], wanted, strict=True)),
        own_view=own["mnt"] and own["pid"],
        own_user=host_user != os.geteuid(),
        system_calls=not facts["makes_hidden_memory"],
        own_disk=facts["writable_bytes"] <= plan.temp_dir_bytes,
    )


@contextlib.contextmanager
def _listening(folder: str) -> Generator[dict[str, Any]]:
    """What a sandbox must not reach, open to all users of this machine: a file, and sockets by TCP, name and path."""
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
            "NAMESPACES": NAMESPACES,
        }
