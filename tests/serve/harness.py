"""Helpers that run agent programs with a worker on scripted servers, and check that nothing is left open."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import anthropic
import numpy as np
import openai

from agent_loop.chat.template import ChatTemplate
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopEntry, LoopRegistry
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.serve.program import AgentProgramLoop
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Origin
from tests.helpers import hermes_template, text_reply, user

MODEL = "gpt-4o"
TEMPERATURE = 0.7
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def in_order(*replies: ScriptedReply | str) -> Script:
    """Return a script that sends the replies or texts in order, and then repeats the last one."""
    waiting = [text_reply(reply) if isinstance(reply, str) else reply for reply in replies]
    return lambda _: waiting.pop(0) if len(waiting) > 1 else waiting[0]


class ProgramHarness:
    """Worker that runs programs."""

    def __init__(
        self,
        script: Script | Sequence[AsyncServerBase],
        *,
        reward: Any = None,
        template: ChatTemplate | None = None,
        loop: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        """Create the worker. `loop` holds arguments of the agent loop, as its entry in `loops.yaml` does."""
        is_script = callable(script)
        self.servers = [ScriptedServer(script, streams=True)] if is_script else list(script)
        self.server: Any = self.servers[0]
        self.manager = AsyncLLMServerManager(self.servers)
        context = LoopContext(
            server_manager=self.manager,
            template=template or hermes_template(),
            limits=EpisodeLimits(**{"prompt_length": 4096, "response_length": 4096, **limits}),
        )
        loops = LoopRegistry()
        loops._entries["agent_program"] = LoopEntry(AgentProgramLoop, loop or {})
        self.worker = AgentLoopWorker(
            context,
            loops=loops,
            default_agent_loop="agent_program",
            reward=None if reward is None else RewardFunction(reward, timeout_s=1),
        )

    async def run(self, *programs: Any, **columns: Any) -> list[Trajectory]:
        """Run programs, one row each, and check the invariants of every trajectory."""
        trajectories = await self.worker.run(
            [job(program, group=group, **columns) for group, program in enumerate(programs)]
        )
        self.assert_nothing_is_left()
        self.assert_tokens_match_the_servers([t.output for t in trajectories])
        return trajectories

    def run_virtual(self, *programs: Any, **columns: Any) -> list[Trajectory]:
        return run_virtual(self.run(*programs, **columns))

    def assert_nothing_is_left(self) -> None:
        assert self.manager.pool.balancer.num_leases == 0
        assert self.manager.pool.balancer.num_sessions == 0
        for server in self.servers:
            if isinstance(server, ScriptedServer):
                assert server.num_running == 0
                assert server.num_sessions == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def assert_tokens_match_the_servers(self, outputs: Sequence[AgentLoopOutput]) -> None:
        """Check that the tokens before each model segment are a prompt that a server received."""
        if not isinstance(self.server, ScriptedServer):
            return
        sent = {tuple(r.prompt_ids.tolist()) for server in self.servers for r in server.requests}
        for output in outputs:
            before: list[int] = []
            for position, segment in enumerate(output.segments):
                follows_model = position and output.segments[position - 1].origin is Origin.MODEL
                if segment.origin is Origin.MODEL and not follows_model:
                    assert tuple(before) in sent
                before += segment.token_ids.tolist()


def run_one(program: Any, *replies: ScriptedReply | str, **options: Any) -> AgentLoopOutput:
    """Run a program against these replies, and return the output of its only trajectory, which did not fail."""
    [trajectory] = ProgramHarness(in_order(*replies), **options).run_virtual(program)
    assert trajectory.output.failure is None, trajectory.output.failure.traceback
    return trajectory.output


def client_of(base_url: str, api_key: str, http_client: Any, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=http_client, **{"max_retries": 0, **options}
    )


async def calls_of(create: Any, *, is_streamed: bool, **asked: Any) -> tuple[list[Any], str, str]:
    """Ask for a completion. Return its calls as clients send them back, its content and how it finished."""
    if is_streamed:
        choices = [chunk.choices[0] async for chunk in await create(**asked, stream=True)]
        said = [choice.delta for choice in choices]
    else:
        choices = (await create(**asked)).choices
        said = [choice.message for choice in choices]
    calls = [call.model_dump(exclude={"index"}) for each in said for call in each.tool_calls or ()]
    return calls, "".join(each.content or "" for each in said), choices[-1].finish_reason


CLIENTS = {
    "client": lambda openai, anthropic: openai,
    "create": lambda openai, anthropic: openai.chat.completions.create,
    "respond": lambda openai, anthropic: openai.responses.create,
    "claude": lambda openai, anthropic: anthropic,
}
"""Client, or method of a client, that a function of a test takes instead of a URL."""


def program_of(function: Any) -> Any:
    """Return the program of a function that takes clients or their methods by the names of `CLIENTS`."""
    names = {*inspect.signature(function).parameters} if callable(function) else set()
    if not names & CLIENTS.keys():
        return function

    async def program(
        row: Any, *, base_url: str, anthropic_base_url: str, api_key: str, http_client: Any
    ) -> Any:
        clients = (
            client_of(base_url, api_key, http_client),
            anthropic.AsyncAnthropic(
                base_url=anthropic_base_url, api_key=api_key, http_client=http_client, max_retries=0
            ),
        )
        given = {"row": row, **{name: CLIENTS[name](*clients) for name in names & CLIENTS.keys()}}
        return await function(**{name: given[name] for name in names})

    return program


def job(program: Any, *, group: int = 0, **columns: Any) -> Job:
    row = {"raw_prompt": user("-"), "program": program_of(program), **columns}
    return Job(row, group, 0, {"temperature": TEMPERATURE})


def tokens(output: AgentLoopOutput) -> list[int]:
    return np.concatenate([segment.token_ids for segment in output.segments]).tolist()


def origins(output: AgentLoopOutput) -> list[str]:
    return [str(segment.origin) for segment in output.segments]


def echo(message: Any) -> Mapping[str, Any]:
    """Return an assistant message as clients send it back."""
    return message.model_dump(exclude_none=True)


def prompts(requests: Sequence[ScriptedRequest]) -> list[str]:
    return [hermes_template().decode(request.prompt_ids) for request in requests]
