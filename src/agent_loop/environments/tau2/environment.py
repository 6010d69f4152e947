"""Environment of one trajectory of tau2-bench."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.environments.base import Environment, EnvironmentTool, Reply, RewardValue
from agent_loop.environments.tau2.domains import Domain, inspect, load_domain, tau2
from agent_loop.environments.tau2.scoring import is_solved, score
from agent_loop.environments.tau2.users import ModelUser, ScriptedUser, ServedUser, User
from agent_loop.errors import ToolError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.base import ArgumentChecking
from agent_loop.types import Message


class Tau2Environment(Environment):
    """A data base, the tools of an agent that works on it, and a user."""

    _user: User | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the policy and the user's first message."""
        await run_in_thread(self._load, row["task"])
        assert self._user is not None
        return [
            {"role": "system", "content": row["raw_prompt"][0]["content"]},
            {"role": "user", "content": await self._user.opening()},
        ]

    def tools(self) -> Sequence[EnvironmentTool]:
        # Inspect checks the arguments itself, and its error is the reply that the benchmark's own agents get.
        return [
            EnvironmentTool.of(
                tool.name,
                tool.description,
                tool.parameters.model_dump(exclude_none=True),
                check_arguments=ArgumentChecking.OFF,
            )
            for tool in self._domain.tools
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        call = inspect("tool").ToolCall(id=str(len(self._calls)), function=name, arguments=arguments)
        self._calls.append(call)
        turn = inspect("model").ChatMessageAssistant(content="", tool_calls=[call])
        stores: Any = inspect("util._store")
        stores.init_subtask_store(self._store)
        try:
            with stores.suspend_store_events():  # they compare the whole data base before and after each call
                result = asyncio.run(inspect("model").execute_tools([turn], list(self._domain.tools)))
        except Exception as error:
            # The benchmark makes every error of a tool its reply.
            raise ToolError(describe_error(error)) from error
        [message] = result.messages
        if message.error is not None:
            raise ToolError(message.error.message)
        return message.text

    async def reply(self, messages: Sequence[Message]) -> Reply:
        assert self._user is not None
        solved = await is_solved(self._domain, self._task_id, messages, self._calls)
        return await self._user.reply(messages, is_solved=solved)

    def reward(self, messages: Sequence[Message]) -> RewardValue:
        inspect("util._store").init_subtask_store(self._store)
        return asyncio.run(score(self._domain, self._task_id, messages))

    async def close(self) -> None:
        if self._user is not None:
            await self._user.close()

    def _load(self, task: Mapping[str, Any]) -> None:
        self._domain: Domain = load_domain(task["domain"])
        self._task_id: str = task["id"]
        self._store = self._domain.store()
        self._calls: list[Any] = []
        served = task["user"]
        if served is None:
            self.on_replay = OnReplay.RERUN
            self._user = ScriptedUser(self._domain.task(self._task_id).user_scenario.instructions)
        else:
            self.on_replay = OnReplay.RESTART
            rules = self._domain.sample(self._task_id).input[0].text
            begin = tau2("common.dataset").USER_MESSAGE.text
            self._user = ModelUser(ServedUser(**served), rules=rules, begin=begin)
