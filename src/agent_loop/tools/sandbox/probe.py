"""Measurement of a sandbox's isolation, by attempting to escape from it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from agent_loop.errors import SandboxError
from agent_loop.tools.sandbox.sandbox import open_sandbox
from agent_loop.tools.sandbox.settings import Mechanism, SandboxSettings

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

facts = {
    "reads": works(open, SECRET),
    "writes": works(write, "/agent-loop-probe") or works(write, SECRET),
    "reaches_tcp": works(connect, socket.AF_INET, ("127.0.0.1", PORT)),
    "reaches_unix": works(connect, socket.AF_UNIX, "\\0" + NAME) or works(connect, socket.AF_UNIX, PATH),
    "signals": works(os.kill, AGENT, 0),
    "looks_into": works(open, f"/proc/{AGENT}/cmdline"),
    "makes_hidden_memory": works(os.memfd_create, "probe"),
    "limits": [
        resource.getrlimit(limit)[0]
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    ],
}
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation in force. Each property was tested from inside a sandbox."""

    mechanism: Mechanism
    files: bool
    """Whether no files of the host can be read except the visible ones, and nothing outside the sandbox's folder can be
    written."""
    network: bool
    """Whether no network address can be reached, including addresses and Unix sockets of this machine."""
    processes: bool
    """Whether the host's processes cannot be signalled or inspected, and the code's own end with the sandbox."""
    privileges: bool
    """Whether the code has no capabilities and cannot gain any by running a program."""
    limits: bool
    """Whether memory, CPU time, processes, open files and file sizes are limited."""
    own_user: bool
    """Whether the code runs as a different user of the host than the agent."""
    system_calls: bool
    """Whether system calls that are common in attacks on a kernel are refused."""

    @property
    def is_sufficient(self) -> bool:
        """Whether untrusted code may run: files, network, processes, privileges and limits are all in force."""
        return self.files and self.network and self.processes and self.privileges and self.limits

    def __str__(self) -> str:
        return f"{self.mechanism}: {self.describe()}"

    def describe(self) -> str:
        """Return the properties in force, and those that are not."""
        claims = {
            "files of the host out of reach": self.files,
            "no network": self.network,
            "processes of the host out of reach": self.processes,
            "no privileges": self.privileges,
            "limits of memory, CPU, processes and files": self.limits,
            "own user": self.own_user,
            "filtered system calls": self.system_calls,
        }
        missing = [claim for claim, holds in claims.items() if not holds]
        in_force = "; ".join(claim for claim, holds in claims.items() if holds)
        return f"{in_force} (not in force: {'; '.join(missing)})" if missing else in_force


async def probe_isolation(settings: SandboxSettings, *, mechanism: Mechanism) -> Isolation:
    """Measure the isolation of a mechanism by running one sandbox that attempts what must fail.

    Raises:
        SandboxError: The sandbox could not be started, or the attempts could not be run.
    """
    with tempfile.TemporaryDirectory(prefix="agent-loop-probe-") as folder, _listening(folder) as given:
        preamble = "".join(f"{key} = {value!r}\n" for key, value in given.items())
        sandbox = await open_sandbox(settings, mechanism=mechanism)
        try:
            reply = await sandbox.run(preamble + ATTEMPTS)
            status = sandbox.host_status()
        finally:
            await sandbox.close()
    if reply.ending != "done":
        raise SandboxError(
            f"the probe of the sandbox failed: {reply.exit_cause or reply.ending} {reply.output.strip()}"
        )
    return judge(json.loads(reply.output), status=status, settings=settings, mechanism=mechanism)


def judge(
    facts: Mapping[str, Any], *, status: Mapping[str, str], settings: SandboxSettings, mechanism: Mechanism
) -> Isolation:
    """Return the isolation that the results of the attempts prove.

    Args:
        facts: The results that the attempts printed.
        status: The host's status of the sandbox's supervisor.
        settings: Settings of the sandbox.
        mechanism: Mechanism of the sandbox. Limits alone never count as isolation of files, network and processes.
    """
    has_landlock, spec = mechanism == "landlock", settings.spec(mechanism)
    host_user = int(status["Uid"].split()[0])
    max_processes = spec.max_processes if spec.has_own_user else sys.maxsize  # the supervisor counts them
    wanted = [spec.memory_bytes, spec.cpu_seconds, max_processes, spec.max_file_bytes]
    return Isolation(
        mechanism=mechanism,
        files=has_landlock and not facts["reads"] and not facts["writes"],
        network=has_landlock and not facts["reaches_tcp"] and not facts["reaches_unix"],
        processes=has_landlock and not facts["signals"] and not facts["looks_into"],
        privileges=not any(int(status[name], 16) for name in CAPABILITIES) and status["NoNewPrivs"] == "1",
        limits=host_user != 0  # the kernel does not limit the number of root's processes
        and all(0 <= found <= limit for found, limit in zip(facts["limits"], wanted, strict=True)),
        own_user=host_user != os.geteuid(),
        system_calls=not facts["makes_hidden_memory"],
    )


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
