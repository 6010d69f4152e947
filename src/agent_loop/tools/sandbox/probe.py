"""Measurement of a sandbox's isolation, by attempting to escape from it."""

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
from agent_loop.tools.sandbox.backend import SandboxBackend
from agent_loop.tools.sandbox.isolation import Isolation
from agent_loop.tools.sandbox.sandbox import open_sandbox

NAMESPACES = ("mnt", "net", "pid")
CAPABILITIES = ("CapEff", "CapPrm", "CapInh", "CapAmb")
"""Capability sets that must be empty. The bounding set is left out, since it is unusable without new privileges."""
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


async def probe_isolation(backend: SandboxBackend) -> Isolation:
    """Measure the isolation of a backend by running one sandbox that attempts what must fail.

    Raises:
        SandboxError: The sandbox could not be started, or the attempts could not be run.
    """
    with tempfile.TemporaryDirectory(prefix="agent-loop-probe-") as folder, _listening(folder) as given:
        preamble = "".join(f"{key} = {value!r}\n" for key, value in given.items())
        sandbox = await open_sandbox(backend)
        try:
            reply = await sandbox.run(preamble + ATTEMPTS)
            status = sandbox.host_status()
        finally:
            await sandbox.close()
    if reply.ending != "done":
        raise SandboxError(
            f"the probe of the sandbox failed: {reply.exit_cause or reply.ending} {reply.output.strip()}"
        )
    return judge(json.loads(reply.output), status=status, backend=backend)


def judge(facts: Mapping[str, Any], *, status: Mapping[str, str], backend: SandboxBackend) -> Isolation:
    """Return the isolation that the results of the attempts prove.

    Args:
        facts: The results that the attempts printed.
        status: The host's status of the sandbox's supervisor.
        backend: The backend that started the sandbox.
    """
    own = {name: facts["namespaces"][name] != os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    has_landlock = backend.mechanism == "landlock"
    spec = backend.settings.spec(backend.mechanism)
    host_user = int(status["Uid"].split()[0])
    max_processes = spec.max_processes if spec.has_own_user else sys.maxsize  # the supervisor counts them
    wanted = [spec.memory_bytes, spec.cpu_seconds, max_processes, spec.max_file_bytes]
    return Isolation(
        mechanism=backend.mechanism,
        files=(own["mnt"] or has_landlock) and not facts["reads"] and not facts["writes"],
        network=(own["net"] or has_landlock) and not facts["reaches_tcp"] and not facts["reaches_unix"],
        processes=own["pid"] or (has_landlock and not facts["signals"] and not facts["looks_into"]),
        privileges=not any(int(status[name], 16) for name in CAPABILITIES) and status["NoNewPrivs"] == "1",
        limits=host_user != 0  # the kernel does not limit the number of root's processes
        and all(0 <= found <= limit for found, limit in zip(facts["limits"], wanted, strict=True)),
        own_view=own["mnt"] and own["pid"],
        own_user=host_user != os.geteuid(),
        system_calls=not facts["makes_hidden_memory"],
        own_disk=facts["writable_bytes"] <= spec.temp_dir_bytes,
    )


@contextlib.contextmanager
def _listening(folder: str) -> Generator[dict[str, Any]]:
    """Provide what a sandbox must not reach, open to all users of this machine.

    Yields:
        The names of a file, a TCP port, and Unix sockets by name and by path, as variables of the attempts.
    """
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
