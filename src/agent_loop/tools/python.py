"""The tool `python`: one sandboxed interpreter per trajectory."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Mapping
from typing import Any

from agent_loop.config import parse_section
from agent_loop.errors import SandboxError, ToolError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.sandbox.inside.supervisor import ExecutionResult
from agent_loop.tools.sandbox.probe import check_isolation
from agent_loop.tools.sandbox.sandbox import Sandbox, open_sandbox
from agent_loop.tools.sandbox.settings import SandboxSettings

FENCED = re.compile(
    r"\A\s*```[ \t]*(?:python|py)?[ \t]*\n(?P<code>.*?)(?:\n?```\s*)?\Z", re.DOTALL | re.IGNORECASE
)
MAX_CODE_CHARACTERS = 1_000_000
START_ALLOWANCE_S = 60.0
"""Seconds for starting a sandbox, and for earlier calls of the same turn."""
NO_OUTPUT = "(no output)"
RESTARTED = "The last call was aborted and the sandbox was restarted: variables and files are lost."
DEFAULT_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": (
            "Runs Python code and returns what it prints, and the value of the last expression. Variables and imports "
            "are kept for later calls. There is no network; files live as long as the conversation."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}


class PythonTool(BaseTool):
    """Tool that runs the model's code. Each trajectory has its own sandbox, which keeps its state between calls."""

    tool_schema: dict[str, Any] = DEFAULT_SCHEMA
    on_replay = OnReplay.RERUN
    """The state depends on the calls alone. With a seed, that includes `random`."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] = DEFAULT_SCHEMA) -> None:
        super().__init__(config, tool_schema)
        self._settings = parse_section(SandboxSettings, config, where=f"the config of tool {self.name!r}")
        self.timeout_s = self._settings.time_limit_s + self._settings.interrupt_grace_s + START_ALLOWANCE_S
        check_isolation(self._settings)
        self._sessions: dict[str, InterpreterSession] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Start the trajectory's sandbox."""
        session = self._sessions[instance_id] = InterpreterSession(self._settings)
        await session.start()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Run the code."""
        code = strip_fence(str(parameters["code"]))
        if len(code) > MAX_CODE_CHARACTERS:
            raise ToolError(
                f"The code has {len(code)} characters; {MAX_CODE_CHARACTERS} are allowed. It was not run."
            )
        reply, notes = await self._sessions[instance_id].run(code)
        if reply.restarted:
            cause = describe_exit(reply.restarted, settings=self._settings)
            notes.append(
                f"Since the last call, {cause}; variables and imports were lost, and this call ran in a new "
                "interpreter."
            )
        text = "\n".join([*notes, reply.output.rstrip() or NO_OUTPUT])
        if reply.ending == "interrupted":
            limit = self._settings.time_limit_s
            text += f"\nThe code was interrupted at the time limit of {limit:g} s; variables are kept."
        elif reply.ending not in ("done", "failed"):
            cause = describe_exit(reply.exit_cause, settings=self._settings)
            lost = "variables and imports are lost, files are kept"
            if reply.exit_cause == "files":
                lost = "variables, imports and files are lost"
            text += f"\n{cause[0].upper()}{cause[1:]}; {lost}."
        if reply.ending != "done":
            raise ToolError(text)
        extra = {"seconds": reply.seconds, "dropped_bytes": reply.dropped_bytes}
        return ToolResponse(text=text), None, extra

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Terminate everything that the trajectory's code started."""
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await session.close()


class InterpreterSession:
    """Sandbox of one trajectory. It is restarted at the next call after it was lost."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._sandbox: Sandbox | None = None
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> Sandbox:
        """Start a sandbox."""
        self._sandbox = await open_sandbox(self._settings)
        return self._sandbox

    async def run(self, code: str) -> tuple[ExecutionResult, list[str]]:
        """Run one call, after the calls before it. Return its result and notes for the model."""
        async with self._one_at_a_time:
            sandbox, notes = self._sandbox, list[str]()
            if sandbox is None:
                sandbox, notes = await self.start(), [RESTARTED]
            try:
                return await sandbox.run(code), notes
            except SandboxError as error:
                await self.close()
                raise ToolError(f"The sandbox failed: {error}. All variables and files are lost.") from error
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """Terminate the sandbox. The next call starts another one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


def strip_fence(code: str) -> str:
    """Return the code inside a Markdown fence, or the text unchanged if it has none."""
    fenced = FENCED.match(code)
    return fenced["code"] if fenced else code


def describe_exit(cause: str, *, settings: SandboxSettings) -> str:
    """Return a clause that says why an interpreter terminated."""
    kind, _, number = cause.partition(" ")
    if kind == "time":
        return f"the code did not stop at the time limit of {settings.time_limit_s:g} s and was killed"
    if kind == "memory":
        return f"the code's processes used more than {settings.memory_mb} MB of memory and were killed"
    if kind == "processes":
        return f"the code ran more than {settings.max_processes} processes, and they were killed"
    if kind == "files":
        return f"the code's files took more than {settings.temp_dir_mb} MB; they were removed and its processes killed"
    if kind == "channel":
        return "the code broke the interpreter's own pipes, and the interpreter was killed"
    if kind == "signal" and int(number) == signal.SIGXCPU:
        return f"the code used more than {settings.cpu_seconds} s of CPU time, and the interpreter was killed"
    if kind == "signal":
        return f"the interpreter was killed by signal {signal.Signals(int(number)).name}"
    return f"the interpreter exited with status {number}"
