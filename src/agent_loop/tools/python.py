"""The tool `python`: a code interpreter per trajectory."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Mapping
from typing import Any

from agent_loop.config import parse_section
from agent_loop.errors import SandboxError, ToolError
from agent_loop.runtime.boundary import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.sandbox.host import SandboxHost
from agent_loop.tools.sandbox.inside.supervisor import Reply
from agent_loop.tools.sandbox.sandbox import Sandbox
from agent_loop.tools.sandbox.settings import SandboxSettings

FENCED = re.compile(
    r"\A\s*```[ \t]*(?:python|py)?[ \t]*\n(?P<code>.*?)(?:\n?```\s*)?\Z", re.DOTALL | re.IGNORECASE
)
MAX_CODE_CHARACTERS = 1_000_000
START_ALLOWANCE_S = 60.0
"""For the start of a sandbox, and for calls of the same turn that go first."""
NO_OUTPUT = "(no output)"
STARTED_ANEW = "The last call was cut off and the sandbox started anew: variables and files are lost."
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
    """Runs the model's code, each trajectory's in a sandbox of its own with the state kept between calls.

    Args:
        config: The keys of `SandboxSettings`.
        tool_schema: Must have a parameter `code`.

    Raises:
        ConfigError: A setting is wrong, or what works here shuts too little in.
    """

    tool_schema: dict[str, Any] = DEFAULT_SCHEMA
    on_replay = OnReplay.RERUN
    """The state is what the calls make it; with a seed that holds for `random` too."""

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] = DEFAULT_SCHEMA) -> None:
        super().__init__(config, tool_schema)
        self._settings = parse_section(SandboxSettings, config, where=f"the config of tool {self.name!r}")
        self.timeout_s = self._settings.time_limit_s + self._settings.interrupt_grace_s + START_ALLOWANCE_S
        self._host = SandboxHost(self._settings)
        self._sessions: dict[str, InterpreterSession] = {}

    @property
    def isolation(self) -> str:
        """What shuts the code in."""
        return str(self._host.isolation)

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Starts the trajectory's sandbox."""
        session = self._sessions[instance_id] = InterpreterSession(self._host)
        await session.start()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Runs the code.

        Raises:
            ToolError: It raised, broke a limit or ended its interpreter; the message says so and holds the output.
            SandboxError: A sandbox could not be started.
        """
        code = strip_fence(str(parameters["code"]))
        if len(code) > MAX_CODE_CHARACTERS:
            raise ToolError(
                f"The code has {len(code)} characters; {MAX_CODE_CHARACTERS} are allowed. It was not run."
            )
        reply, notes = await self._sessions[instance_id].run(code)
        notes += describe_restart(reply, settings=self._settings)
        text = "\n".join([*notes, reply.output.rstrip() or NO_OUTPUT])
        if reply.ending != "done":
            raise ToolError("\n".join([text, *describe_failure(reply, settings=self._settings)]))
        extra = {"seconds": reply.seconds, "dropped_bytes": reply.dropped_bytes}
        return ToolResponse(text=text), None, extra

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends everything that the trajectory's code started."""
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await session.close()

    def close(self) -> None:
        """Ends what sandboxes come from; the tool is of no more use."""
        self._host.close()


class InterpreterSession:
    """One trajectory's sandbox, started anew where it was lost."""

    def __init__(self, host: SandboxHost) -> None:
        self._host = host
        self._sandbox: Sandbox | None = None
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> Sandbox:
        """Starts a sandbox.

        Raises:
            SandboxError: It could not be started.
        """
        self._sandbox = await self._host.open()
        return self._sandbox

    async def run(self, code: str) -> tuple[Reply, list[str]]:
        """Runs one call after the other. Returns what came of it and what the model should know besides.

        Raises:
            ToolError: The sandbox ended during the call.
            SandboxError: A new one could not be started.
        """
        async with self._one_at_a_time:
            sandbox, notes = self._sandbox, list[str]()
            if sandbox is None:
                sandbox, notes = await self.start(), [STARTED_ANEW]
            try:
                return await sandbox.run(code), notes
            except SandboxError as error:
                await self._drop()
                raise ToolError(f"The sandbox failed: {error}. All variables and files are lost.") from error
            except BaseException:
                await self._drop()
                raise

    async def close(self) -> None:
        """Ends the sandbox."""
        await self._drop()

    async def _drop(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


def strip_fence(code: str) -> str:
    """The code in a Markdown fence; other text as it is."""
    fenced = FENCED.match(code)
    return fenced["code"] if fenced else code


def describe_restart(reply: Reply, *, settings: SandboxSettings) -> list[str]:
    """What the model is told when the interpreter of its last call was gone before this one."""
    if not reply.restarted:
        return []
    cause = describe_end(reply.restarted, settings=settings)
    return [f"Since the last call, {cause}; variables and imports were lost, this call began anew."]


def describe_failure(reply: Reply, *, settings: SandboxSettings) -> list[str]:
    """What the model is told of a call that did not work, beside the output; a traceback there speaks for itself."""
    if reply.ending == "failed":
        return []
    if reply.ending == "interrupted":
        return [
            f"The code was interrupted at the time limit of {settings.time_limit_s:g} s; variables are kept."
        ]
    cause = describe_end(reply.end_cause, settings=settings)
    lost = "variables, imports and files are lost"
    if reply.end_cause != "files":
        lost = "variables and imports are lost, files are kept"
    return [f"{cause[0].upper()}{cause[1:]}; {lost}."]


def describe_end(cause: str, *, settings: SandboxSettings) -> str:
    """Why an interpreter is gone, as a clause."""
    kind, _, number = cause.partition(" ")
    if kind == "time":
        return f"the code did not stop at the time limit of {settings.time_limit_s:g} s and was killed"
    if kind == "memory":
        return f"the code's processes held more than {settings.memory_mb} MB of memory and were killed"
    if kind == "processes":
        return f"the code ran more than {settings.max_processes} processes, and they were killed"
    if kind == "files":
        return f"the code's files took more than {settings.temp_dir_mb} MB; they were removed, its processes killed"
    if kind == "channel":
        return "the code broke the interpreter's own pipes, and it was ended"
    if kind == "signal" and int(number) == signal.SIGXCPU:
        return f"the code used more than {settings.cpu_seconds} s of CPU time, and the interpreter was killed"
    if kind == "signal":
        return f"the interpreter was killed by signal {signal.Signals(int(number)).name}"
    return f"the interpreter ended with exit status {number}"
