"""Environments of the verifiers package, which run in processes of an interpreter of their own.

The trajectories of an environment share one process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

from pydantic import ConfigDict

from agent_loop.config import Positive, Section
from agent_loop.environments.suite import TaskSuite, option_value
from agent_loop.errors import ConfigError, EnvironmentUnavailable
from agent_loop.runtime.child_process import inherited_environment
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import one_line
from agent_loop.runtime.owner import OWNER_VARIABLE, this_process

RUNNER = Path(__file__).with_name("verifiers_runner.py")
"""Program that imports verifiers. It does not import this package."""
MAX_LINE_BYTES = 2**26
MAX_LOG = 2**14
"""Characters from the end of a process's log that are kept with an error."""
END_S = 10.0
"""Seconds that a process has to end."""


class VerifiersOptions(Section):
    """Options of an environment. Further options belong to the environment's own configuration."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    python: str = ""
    """Path of the interpreter that has verifiers. "" is the running one."""
    size: Positive | None = None
    """Number of rows. None takes all tasks of the environment."""


class VerifiersSuite(TaskSuite):
    """Environments of verifiers, which run in an interpreter of their own."""

    name = "verifiers"
    extra = "verifiers"
    summary = "environments of verifiers: verifiers:PACKAGE or verifiers:FILE.py, with ?python= of their interpreter"
    options: ClassVar[type[Section]] = VerifiersOptions
    reward_parts: ClassVar[Mapping[str, str]] = {
        "reward functions of the environment": "weighted value of each, by its name; the reward is their sum"
    }
    agent_name = "verifiers"
    lists_tasks = False

    def tasks(self) -> Sequence[str]:
        return ()

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        place: dict[str, Any] = {
            "env": str(Path(task).resolve()) if task.endswith(".py") else task,
            "settings": nested_settings(options.model_extra or {}),
            "python": options.python,
        }
        spec = EnvironmentSpec(
            place["env"], json.dumps(place["settings"], sort_keys=True), options.python or sys.executable
        )
        for row in read_rows(spec, size=options.size):
            messages = row.pop("messages")
            yield {"raw_prompt": messages, "task": {**place, **row}}

    def identity(self, row: Mapping[str, Any]) -> str:
        return str(row["task"]["key"])


def nested_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dotted names, such as `taskset.split`, as nested dicts. JSON values are decoded."""
    settings: dict[str, Any] = {}
    for name, value in options.items():
        *groups, last = name.split(".")
        group = settings
        for part in groups:
            inner: Any = group.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"options of verifiers: {part} is {inner!r}, so {name} cannot be set; remove one"
                )
            group = cast(dict[str, Any], inner)
        group[last] = option_value(value)
    return settings


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment of verifiers, with its settings and its interpreter."""

    env: str
    """Name of the environment's package, or path of its file."""
    settings: str
    """Configuration of the environment as JSON."""
    python: str
    """Path of the interpreter that has verifiers."""

    def command(self, mode: str, **more: Any) -> list[str]:
        """Return the command that runs the environment."""
        spec = {"env": self.env, "settings": json.loads(self.settings), **more}
        return [self.python, str(RUNNER), mode, json.dumps(spec)]


def read_rows(spec: EnvironmentSpec, *, size: int | None) -> Iterator[dict[str, Any]]:
    """Yield the tasks of an environment as it makes them: their `messages`, `index`, `key` and `name`."""
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                spec.command("rows", size=size), env=_variables({}), stdout=subprocess.PIPE, stderr=log
            )
        except OSError as error:
            raise ConfigError(_not_started(spec, str(error))) from error
        with process:
            assert process.stdout is not None
            try:
                yield from map(json.loads, process.stdout)
                if process.wait():
                    log.seek(0)
                    raise ConfigError(_not_started(spec, log.read().decode(errors="replace")))
            finally:
                process.kill()  # as many rows as are wanted were read


@asynccontextmanager
async def environment_process(
    spec: EnvironmentSpec, *, env: Mapping[str, str]
) -> AsyncGenerator[EnvironmentProcess]:
    """Keep the process of an environment open. The first trajectory starts it, the last one ends it."""
    processes = _processes.setdefault(asyncio.get_running_loop(), {})
    key = (spec, tuple(sorted(env.items())))
    process = processes.setdefault(key, EnvironmentProcess(spec, env))
    process.num_leases += 1
    try:
        await process.open()
        yield process
    finally:
        process.num_leases -= 1
        if not process.num_leases:
            processes.pop(key, None)
            await run_shielded(process.close, timeout_s=3 * END_S)


@dataclass(eq=False, slots=True)
class EnvironmentProcess:
    """Process that runs the rollouts of one environment. A process that ended is started again for the next rollout."""

    spec: EnvironmentSpec
    env: Mapping[str, str]
    num_leases: int = 0
    _process: asyncio.subprocess.Process | None = None
    _folder: Path | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> None:
        """Start the process, unless it runs."""
        async with self._lock:
            if self._process is not None and self._process.returncode is None:
                return
            await self._end()
            self._folder = Path(tempfile.mkdtemp(prefix="agent-loop-"))
            command = self.spec.command("serve", socket=str(self._folder / "socket"))
            with (self._folder / "log").open("wb") as log:
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *command,
                        env=_variables(self.env),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                    )
                except OSError as error:
                    raise ConfigError(_not_started(self.spec, str(error))) from error
            assert self._process.stdout is not None
            if not await self._process.stdout.readline():
                raise ConfigError(_not_started(self.spec, self._log()))

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one rollout and return its result: `result`, or `error` and `traceback`. Cancelling ends the rollout."""
        line = b""
        with suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(
                str(cast(Path, self._folder) / "socket"), limit=MAX_LINE_BYTES
            )
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
        if not line.endswith(b"\n"):
            raise EnvironmentUnavailable(
                f"the process of the environment {self.spec.env!r} of verifiers ended during a rollout: "
                f"{one_line(self._log().strip(), max_length=MAX_LOG) or 'its log is empty'}"
            )
        return json.loads(line)

    async def close(self) -> None:
        """End the process and its children."""
        async with self._lock:
            if not self.num_leases:
                await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _log(self) -> str:
        text = (cast(Path, self._folder) / "log").read_text(errors="replace")
        return text[-MAX_LOG:]


def _variables(more: Mapping[str, str]) -> dict[str, str]:
    return {**inherited_environment(), OWNER_VARIABLE: this_process().token, **more}


def _not_started(spec: EnvironmentSpec, output: str) -> str:
    last = output.strip().splitlines()[-1:]
    text = f"the environment {spec.env!r} of verifiers does not start in {spec.python}: " + "".join(last)
    if "No module named 'verifiers" in text:
        text += f'; install it there ("{spec.python}" -m pip install "verifiers>=0.4,<0.5"), or name another python'
    return text


_Key = tuple[EnvironmentSpec, tuple[tuple[str, str], ...]]
_processes: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, EnvironmentProcess]] = WeakKeyDictionary()
