"""The command line of Podman or Docker."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO

from agent_loop.errors import ConfigError, WorkspaceError
from agent_loop.runtime.child_process import CommandResult, run_command
from agent_loop.runtime.owner import OWNER_VARIABLE, SPARED_SUFFIX, this_process

COMMAND_TIMEOUT_S = 120.0
"""Time limit of commands that need neither the network nor a build."""


@dataclass(frozen=True)
class CommandLine:
    """Runs commands of one container runtime."""

    runtime: str
    """`podman` or `docker`."""
    arguments: tuple[str, ...] = ()
    """Arguments before the subcommand."""

    @cached_property
    def program(self) -> str:
        """Path of the runtime's program.

        Raises:
            ConfigError: The program is not installed.
        """
        path = shutil.which(self.runtime)
        if path is None:
            raise ConfigError(
                f"workspace.container.runtime is {self.runtime!r}, which is not installed; install it, or name the "
                "other one of podman and docker"
            )
        return path

    async def run(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: bytes | BinaryIO = b"",
        timeout_s: float | None = COMMAND_TIMEOUT_S,
        stdout_sink: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        """Run a command of the runtime, such as `exec`, and return its result, also if it failed.

        Args:
            arguments: The subcommand and its arguments.
            env: Variables added to the runtime's own environment.
            stdin: Standard input.
            timeout_s: Time limit.
            stdout_sink: Gets the bytes of standard output.
        """
        return await run_command(
            [self.program, *self.arguments, *arguments],
            env={**os.environ, **(env or {}), OWNER_VARIABLE: _owner_of(arguments[0])},
            stdin=stdin,
            cwd=tempfile.gettempdir(),  # conmon writes a file into it when a container exceeds its memory
            timeout_s=timeout_s,
            stdout_sink=stdout_sink,
        )

    async def output(self, *arguments: str, timeout_s: float | None = COMMAND_TIMEOUT_S) -> str:
        """Run a command that has to succeed, and return its output.

        Raises:
            WorkspaceError: It failed.
        """
        result = await self.run(*arguments, timeout_s=timeout_s)
        if result.exit_code:
            raise WorkspaceError(f"{self.describe(arguments)} failed: {last_lines(result)}")
        return result.stdout.strip()

    def describe(self, arguments: Sequence[str]) -> str:
        """Return the start of a command, for errors."""
        return " ".join([self.runtime, *arguments[:1]])


def _owner_of(subcommand: str) -> str:
    """Return the mark of a command. A container whose start or removal was interrupted cannot be removed later."""
    return this_process().token + (SPARED_SUFFIX if subcommand in ("run", "rm") else "")


def last_lines(result: CommandResult, *, num_lines: int = 3) -> str:
    """Return why a command failed: the last lines that it wrote."""
    if result.timed_out:
        return "it exceeded its time limit"
    text = result.stderr.strip() or result.stdout.strip() or f"exit status {result.exit_code}"
    return "\n".join(text.splitlines()[-num_lines:])
