"""Base class of harnesses: loops that run an agent's program in a workspace, behind the gateway."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from agent_loop.errors import ConfigError, DataError, WorkspaceError
from agent_loop.interactions.simulated_user import text_of
from agent_loop.loops.base import LoopContext
from agent_loop.runtime.child_process import CommandResult
from agent_loop.runtime.describe import describe_value, one_line
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.threads import run_in_thread
from agent_loop.serve.gateway import Endpoint
from agent_loop.serve.program import Program, ProgramFailed, ProgramLoop, checked_env
from agent_loop.serve.session import MAX_BRANCHES
from agent_loop.tools.registry import expand_variables
from agent_loop.types import Message, Row
from agent_loop.workspaces.base import Workspace
from agent_loop.workspaces.factory import open_workspace
from agent_loop.workspaces.settings import read_workspace

MAX_ERROR = 300
"""Characters of an agent's error that are kept in a failure's first line."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One run of an agent. All paths and URLs are as the agent sees them."""

    task: str
    """Text of the row's messages."""
    folder: str
    """Working folder."""
    home: str
    """Home folder of this run alone, outside of the working folder. Removed at the end."""
    base_url: str
    """Base URL of the OpenAI API."""
    api_key: str
    model: str
    """Name of the model. The model in training answers to any name."""
    context_length: int
    """Number of tokens that a conversation may have."""
    max_turn_tokens: int
    """Number of tokens that a completion may have."""

    @property
    def anthropic_base_url(self) -> str:
        """Base URL of the Anthropic Messages API, without `/v1`, which Anthropic clients add."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """Command that runs an agent."""

    arguments: Sequence[str]
    """Arguments after the name of the program."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, in addition to the workspace's and `HOME`."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts of files by their path in the home folder, such as settings."""
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended."""

    answer: str = ""
    """Final message of the agent, if it reports one."""
    gave_up: str = ""
    """Why the agent gave up by itself, for example at its own limit of turns. Its trajectory is scored."""
    error: str = ""
    """Why the program failed for another reason, such as a failed request. Its trajectory fails and is not scored."""


class AgentFailed(ProgramFailed):
    """The program of an agent failed, apart from what the model did."""

    def __init__(self, name: str, error: str, result: CommandResult) -> None:
        text = f"{name} failed: {one_line(error, max_length=MAX_ERROR)}"
        super().__init__(text, traceback="\n".join([error, result.stdout, result.stderr]).strip())


def exit_error(result: CommandResult) -> str:
    """Return the error of a program by its exit status and the end of its output; empty if the status is 0."""
    code = result.exit_code
    if code == 0:
        return ""
    how = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
    output = result.stderr.strip() or result.stdout.strip()
    return ": ".join([how, *output.splitlines()[-1:]])


def task_of(row: Row, *, where: str = "the row") -> str:
    """Return the text of the row's messages, as the task of an agent."""
    messages: Sequence[Message] = row.get("raw_prompt") or ()
    texts = [text_of(message) for message in messages]
    for index, message in enumerate(messages):
        if message["role"] not in ("system", "user"):
            raise DataError(
                f"{where}: raw_prompt[{index}] has the role {message['role']!r}; an agent's task consists of "
                "messages of the system and the user"
            )
        if not isinstance(message.get("content"), str) and not texts[index]:
            raise DataError(
                f"{where}: raw_prompt[{index}].content is {describe_value(message.get('content'))}; an agent's task is "
                "text"
            )
    task = "\n\n".join(text for text in texts if text)
    if not task:
        raise DataError(f"{where}: raw_prompt has no text; give the task of the agent as a user message")
    return task


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the lines that are JSON objects, in their order. Other lines, such as warnings, are left out."""
    objects: list[dict[str, Any]] = []
    for line in text.split("\n"):
        if line.startswith("{"):
            try:
                value: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                objects.append(cast(dict[str, Any], value))
    return objects


def last_json_object(text: str) -> dict[str, Any] | None:
    """Return the last line that is a JSON object; None if there is no such line."""
    objects = json_lines(text)
    return objects[-1] if objects else None


NOT_FOUND = (126, 127)
"""Exit statuses of container runtimes and shells for a program that does not exist or cannot be executed."""
COMMON_ENV = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost", "TZ": "UTC", "CI": "1"}
"""Variables of every agent: no proxy between it and the gateway, and the same time zone on every machine."""


class HarnessLoop(ProgramLoop):
    """Base class of loops that run a coding agent as it is published.

    The agent works in the row's workspace, and its requests go to the gateway. Each of its conversations, also those
    of its sub-agents, is recorded to the token. A subclass says how the program is called, and how its end is read.
    """

    program: ClassVar[str]
    """Name of the program."""
    install: ClassVar[str]
    """Command that installs the program."""
    default_model: ClassVar[str] = "agent-loop"
    """Name of the model that the agent asks for."""
    volatile: ClassVar[str] = ""
    """Regular expression for texts that the agent writes differently whenever it runs, such as dates and process ids.
    They are ignored when a resumed agent's requests are compared with the recorded ones."""

    def __init__(
        self,
        context: LoopContext,
        *,
        workspace: Mapping[str, Any] | None = None,
        executable: str = "",
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        model: str = "",
        max_branches: int = MAX_BRANCHES,
        accept_as_wish: Sequence[str] = (),
    ) -> None:
        """Create the loop.

        Args:
            context: Context of the loop.
            workspace: Workspace of rows without a column `workspace`. Without either, the agent works in an empty
                folder.
            executable: Path of the program, if it is not on `PATH`.
            arguments: Further arguments of the program.
            env: Additional environment variables of the program. `$NAME` in a value is replaced by that variable of
                this process. The program inherits only the variables for paths, locale and the like.
            model: Name of the model that the agent asks for. The model in training answers to any name.
            max_branches: Maximum number of conversations of a run.
            accept_as_wish: Names of request parameters that the agent may send although they cannot be honoured.
        """
        super().__init__(context, max_branches=max_branches, accept_as_wish=accept_as_wish)
        if context.log is not None and self.volatile:
            context.log.volatile = re.compile(self.volatile)
        self._workspace = workspace
        self.executable = executable or self.program
        self.arguments = list(arguments)
        self.env = expand_variables(checked_env(env or {}), where="env")
        self.model = model or self.default_model

    @classmethod
    def check_row(cls, row: Row, arguments: Mapping[str, Any], *, where: str) -> None:
        task_of(row, where=where)
        given: Any = row.get("workspace") or arguments.get("workspace") or {}
        workspace = read_workspace(given, where=f"{where}: workspace")
        if workspace.container is not None or workspace.provider:
            return  # Whether the program is installed in there shows when it is called.
        executable = arguments.get("executable") or cls.program
        env: Mapping[str, str] = arguments.get("env") or {}
        if shutil.which(executable, path=env.get("PATH")) is None:
            raise ConfigError(cls.missing(executable))

    @abstractmethod
    def command(self, run: AgentRun) -> AgentCommand:
        """Return the command that works on the task without asking questions."""

    def end(self, result: CommandResult) -> AgentEnd:
        """Read how the agent ended. By default, an exit status other than 0 is an error."""
        return AgentEnd(error=exit_error(result))

    @asynccontextmanager
    async def prepared(self, row: Row) -> AsyncGenerator[Program]:
        given: Any = row.get("workspace") or self._workspace or {}
        settings = read_workspace(given)
        task = task_of(row)
        async with open_workspace(settings, key=_key_of(row)) as workspace:
            yield Program(partial(self._run_agent, task, workspace), workspace, settings.check)

    async def _run_agent(self, task: str, workspace: Workspace, endpoint: Endpoint) -> Mapping[str, Any]:
        limits = self.context.limits
        run = AgentRun(
            task=task,
            folder=workspace.folder,
            home=workspace.home,
            base_url=await workspace.reach(endpoint.base_url),
            api_key=endpoint.api_key,
            model=self.model,
            context_length=limits.prompt_length + limits.response_length,
            max_turn_tokens=min(limits.max_turn_tokens or limits.response_length, limits.response_length),
        )
        command = self.command(run)
        await _put_files(workspace, command.files, folder=run.home)
        try:
            result = await workspace.exec(
                [self.executable, *command.arguments, *self.arguments],
                env={**COMMON_ENV, "HOME": run.home, **command.env, **self.env},
                stdin=command.stdin.encode(),
            )
        except WorkspaceError as error:
            raise WorkspaceError(
                f"{error}; if the workspace lacks {self.executable}, install it there with `{self.install}`"
            ) from error
        if result.exit_code in NOT_FOUND and not result.stdout:
            raise ConfigError(f"{self.missing(self.executable)}: {result.stderr.strip()[-200:]}")
        end = self.end(result)
        if end.error:
            raise AgentFailed(self.program, end.error, result)
        return {"agent_answer": end.answer, "agent_gave_up": end.gave_up}

    @classmethod
    def missing(cls, executable: str) -> str:
        """Return the error for a program that is not installed."""
        return (
            f"{executable} is not installed, or not on PATH; install it with `{cls.install}`, or set `executable` in "
            "the loop's entry of rollout.agent.agent_loop_config_path"
        )


async def _put_files(workspace: Workspace, files: Mapping[str, str], *, folder: str) -> None:
    """Write files into a folder of the workspace. The folder is made even if there are no files."""

    def write(source: Path) -> None:
        for name, text in files.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    with tempfile.TemporaryDirectory() as source:
        await run_in_thread(write, Path(source))
        await workspace.put(Path(source), folder)


def _key_of(row: Row) -> str:
    """Return digits that are the same when the trajectory of a row is resumed, and different for other trajectories."""
    collector = IncidentCollector.current()
    trajectory_id = "" if collector is None else collector.owner
    return hashlib.sha256(
        f"{trajectory_id} {row.get('raw_prompt')} {row.get('workspace')}".encode()
    ).hexdigest()[:16]
