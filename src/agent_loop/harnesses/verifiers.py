"""The loop of environments of verifiers, which call the model over HTTP from a process of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from agent_loop.environments.verifiers import (
    EnvironmentProcess,
    EnvironmentSpec,
    environment_process,
)
from agent_loop.errors import DataError
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import register
from agent_loop.runtime.describe import describe_value
from agent_loop.serve.gateway import Endpoint
from agent_loop.serve.program import Program, ProgramFailed, ProgramLoop, checked_env
from agent_loop.serve.session import MAX_BRANCHES
from agent_loop.tools.registry import expand_variables
from agent_loop.types import Row


@register("verifiers")
class VerifiersLoop(ProgramLoop):
    """Runs the task of a row in its environment of verifiers, behind the gateway.

    The environment's rewards become the trajectory's reward. An error of the environment fails the trajectory.
    """

    def __init__(
        self,
        context: LoopContext,
        *,
        python: str = "",
        env: Mapping[str, str] | None = None,
        max_branches: int = MAX_BRANCHES,
        accept_as_wish: Sequence[str] = (),
    ) -> None:
        """Create the loop.

        Args:
            context: Context of the loop.
            python: Interpreter that has verifiers, for rows that name none. "" is the running one.
            env: Environment variables of the environment's process, in addition to those that programs inherit. `$NAME`
                in a value is replaced by that variable of this process.
            max_branches: Maximum number of conversations of a rollout.
            accept_as_wish: Names of request parameters that the environment may send although they cannot be honoured.
        """
        super().__init__(context, max_branches=max_branches, accept_as_wish=accept_as_wish)
        self._python = python or sys.executable
        self._env = expand_variables(checked_env(env or {}), where="env")

    @classmethod
    def check_row(cls, row: Row, arguments: Mapping[str, Any], *, where: str) -> None:
        _read_task(row, where=where)

    @asynccontextmanager
    async def prepared(self, row: Row) -> AsyncGenerator[Program]:
        task = _read_task(row, where="the row")
        spec = EnvironmentSpec(
            task["env"], json.dumps(task["settings"], sort_keys=True), task["python"] or self._python
        )
        async with environment_process(spec, env=self._env) as process:
            yield Program(partial(_run, process, task))


async def _run(process: EnvironmentProcess, task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """Run one rollout of a task."""
    request = {
        "index": task["index"],
        "key": task["key"],
        "base_url": endpoint.base_url,
        "api_key": endpoint.api_key,
    }
    answer = await process.run(request)
    if "error" in answer:
        raise ProgramFailed(f"verifiers: {answer['error']}", traceback=answer["traceback"])
    return answer["result"]


def _read_task(row: Row, *, where: str) -> Mapping[str, Any]:
    """Return the row's column `task`."""
    task: Any = row.get("task")
    missing = {"env", "settings", "python", "index", "key"} - set(
        cast(Mapping[str, Any], task) if isinstance(task, Mapping) else ()
    )
    if missing:
        raise DataError(
            f"{where}: task is {describe_value(task)}; the loop verifiers plays rows of verifiers:ENVIRONMENT"
        )
    return cast(Mapping[str, Any], task)
