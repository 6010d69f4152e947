"""Partial rollouts on scripted servers: a deterministic script, tools that count their calls, and a runner."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.config import MultiTurnConfig
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.interactions.scripted import ScriptedInteraction
from agent_loop.loops.base import LoopContext
from agent_loop.loops.partial import AsyncPartialToolAgentLoop
from agent_loop.runtime.instances import OnReplay
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import StopReason
from tests.helpers import call_text, encoded, hermes_template, user

TOKEN_S = 0.1
OPENING = encoded("<|im_start|>assistant\n")


def scripted_turns(turns: Sequence[str]) -> Any:
    """Return a script that samples the next of these turns, or the rest of a turn whose start is in the context.

    The log-prob of a token is derived from its position in the context.
    """
    replies = [encoded(f"{turn}<|im_end|>") for turn in turns]

    def script(request: ScriptedRequest) -> ScriptedReply:
        ids = request.prompt_ids.tolist()
        starts = [i for i in range(len(ids)) if ids[i : i + len(OPENING)] == OPENING]
        head = ids[starts[-1] + len(OPENING) :]
        turn_ids = replies[len(starts) - 1]
        assert turn_ids[: len(head)] == head
        rest = turn_ids[len(head) :]
        logprobs = [logprob_at(len(ids) + position) for position in range(len(rest))]
        return ScriptedReply(rest, logprobs=logprobs, latency_s=TOKEN_S * len(rest))

    return script


def logprob_at(position: int) -> float:
    """Return the log-prob of the token at a position of the context."""
    return -(position % 89 + 1) / 100


class CallCounts:
    """Number of started and ended calls of all tool instances, by tool name."""

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()


class CountingTool(BaseTool):
    """Tool that counts all calls in `counts`. With `on_replay` `rerun`, replies count the calls of the trajectory."""

    def __init__(
        self,
        name: str,
        counts: CallCounts,
        *,
        on_replay: OnReplay,
        latency_s: float,
        reward: float | None = None,
    ) -> None:
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        function = {"name": name, "description": "Does.", "parameters": parameters}
        super().__init__({}, {"type": "function", "function": function})
        self.on_replay = on_replay
        self.open: dict[str, int] = {}
        self._counts = counts
        self._latency_s = latency_s
        self._reward = reward

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.open[instance_id] = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self._counts.started[self.name] += 1
        await asyncio.sleep(self._latency_s * (1 + parameters["a"] % 3))
        self._counts.ended[self.name] += 1
        self.open[instance_id] += 1
        is_counting = self.on_replay is OnReplay.RERUN
        text = f"{parameters['a']} done" + (f", call {self.open[instance_id]}" if is_counting else "")
        return ToolResponse(text=text), self._reward, {"a": parameters["a"]}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.open[instance_id]


class SlowUser(ScriptedInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(1.5)
        return await super().generate_response(instance_id, messages, **kwargs)


class PartialRunner:
    """One row with its tools and servers. Each part of the trajectory runs with new tools and a new loop."""

    def __init__(
        self,
        turns: Sequence[str],
        *,
        tools: Mapping[str, tuple[OnReplay, float]],
        replies: Sequence[str] = (),
        num_servers: int = 1,
        max_parallel_calls: int = 2,
        tool_class: type[CountingTool] = CountingTool,
        **limits: Any,
    ) -> None:
        self.counts = CallCounts()
        self.servers = [
            ScriptedServer(scripted_turns(turns), name=f"scripted-{n}", streams=num_servers > 1)
            for n in range(num_servers)
        ]
        self.server_manager = AsyncLLMServerManager(self.servers)
        self._tools = tools
        self._tool_class = tool_class
        self._replies = replies
        self._multi_turn = MultiTurnConfig(max_parallel_calls=max_parallel_calls)
        self._limits = EpisodeLimits(**{"prompt_length": 4096, "response_length": 4096, **limits})

    async def run(
        self, *, cancel_after_s: float | None = None, partial_output: AgentLoopOutput | None = None
    ) -> AgentLoopOutput:
        """Run one part to the end, or until it is cancelled, and pickle and unpickle its output."""
        tools = {
            name: self._tool_class(name, self.counts, on_replay=on_replay, latency_s=latency_s, reward=0.25)
            for name, (on_replay, latency_s) in self._tools.items()
        }
        interaction = SlowUser(self._replies)
        event = asyncio.Event()
        with self.server_manager.scope() as server_manager:
            context = LoopContext(
                server_manager=server_manager,
                template=hermes_template(),
                limits=self._limits,
                multi_turn=self._multi_turn,
                tools=tools,
                interactions={"scripted": interaction},
            )
            timer = None
            if cancel_after_s is not None:
                timer = asyncio.get_running_loop().call_later(cancel_after_s, event.set)
            row: dict[str, Any] = {"raw_prompt": user("What is to be done?")}
            if self._replies:
                row["interaction_kwargs"] = {"name": "scripted"}
            output = await AsyncPartialToolAgentLoop(context).run(
                {}, cancellation_event=event, partial_output=partial_output, **row
            )
            if timer is not None:
                timer.cancel()
        assert not any(tool.open for tool in tools.values())
        assert not interaction.num_open
        assert not any(server.num_running or server.num_sessions for server in self.servers)
        return pickle.loads(pickle.dumps(output))

    async def run_in_parts(self, cuts_s: Sequence[float]) -> tuple[AgentLoopOutput, list[AgentLoopOutput]]:
        """Run a trajectory, and cancel each part after the given seconds. Return the result and each part's output."""
        parts: list[AgentLoopOutput] = []
        output: AgentLoopOutput | None = None
        for cut_s in cuts_s:
            output = await self.run(cancel_after_s=cut_s, partial_output=output)
            if output.stop_reason is not StopReason.CANCELLED:
                return output, parts
            parts.append(output)
        return await self.run(partial_output=output), parts


def random_turns(rng: random.Random, *, many: Sequence[str], one: str) -> list[str]:
    """Return turns with calls, without calls and with malformed calls, and an answer at the end.

    A turn may call the tools in `many` more than once, and `one` only once, because the order of its calls matters.
    """
    turns: list[str] = []
    for _ in range(rng.randint(1, 4)):
        names = [rng.choice(many) for _ in range(rng.randint(0, 3))]
        names += [one] * rng.randint(0, 1)
        rng.shuffle(names)
        calls = [call_text(name, a=rng.randrange(100)) for name in names]
        if rng.random() < 0.1:
            calls.append("<tool_call>\n{oops\n</tool_call>")
        turns.append(f"I think {rng.randrange(1000)}. " + "".join(calls))
    return [*turns, *["That is the answer."] * 8]


def facts(output: AgentLoopOutput) -> dict[str, Any]:
    """Return the facts that must not depend on how often a trajectory was cancelled."""
    logprobs = output.response_logprobs
    return {
        "prompt": output.prompt_ids.tolist(),
        "response": output.response_ids.tolist(),
        "mask": output.response_mask.tolist(),
        "logprobs": None if logprobs is None else logprobs.tolist(),
        "stop_reason": output.stop_reason,
        "messages": output.messages,
        "feedback": output.feedback,
        "incidents": output.incidents,
        "num_turns": output.num_turns,
        "num_tool_calls": output.metrics.num_tool_calls,
        "extra_fields": output.extra_fields,
    }
