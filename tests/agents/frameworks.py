"""Runs agent frameworks against the gateway with a scripted policy, and checks what is recorded of them.

The frameworks use clients of their own over a real socket, and their default settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from agent_loop.servers.base import Ability
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.trajectory import AgentLoopOutput, IncidentKind
from agent_loop.types import Origin, StopReason
from tests.helpers import text_reply
from tests.serve.harness import ProgramHarness, prompts

ONE_TOOL_TURN = ["prompt", "model", "tool", "model"]
"""Origins of a conversation in which the model calls a tool and then answers."""


class Sum(BaseModel):
    """Structured output that the tests ask for."""

    total: int
    note: str = ""


SUM = '{"total": 3, "note": "as asked"}'
"""A `Sum` as the model writes it."""


@dataclass
class Policy:
    """Script that writes texts in order, without the beginning of a text that its prompt ends with."""

    texts: Sequence[str]
    sampled: list[list[int]] = field(default_factory=list)
    """Tokens of each completion."""

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        text = self.texts[len(self.sampled)]
        [prompt] = prompts([request])
        given = next(length for length in range(len(text), -1, -1) if prompt.endswith(text[:length]))
        reply = text_reply(text[given:])
        self.sampled.append(list(reply.token_ids))
        return reply


@dataclass(frozen=True)
class Recorded:
    """What is recorded of one program."""

    outputs: Sequence[AgentLoopOutput]
    """One output for each conversation."""
    prompts: Sequence[str]
    """Prompts that the server received, as texts."""

    @property
    def output(self) -> AgentLoopOutput:
        """The output of a program that led one conversation."""
        [output] = self.outputs
        return output

    @property
    def dropped(self) -> list[str]:
        """Parameters that were ignored, without the reasons."""
        return [
            incident.detail.partition(" ")[0]
            for output in self.outputs
            for incident in output.incidents
            if incident.kind is IncidentKind.DROPPED_PARAMETER
        ]


def run_framework(
    program: Callable[..., Any] | str,
    *texts: str,
    abilities: Iterable[Ability] = (),
    has_stops: bool = False,
    **loop: Any,
) -> Recorded:
    """Run a program, and check that it ends well and that each sampled token is recorded once, to be trained on.

    Args:
        program: Function of a row, `base_url` or `anthropic_base_url`, and `api_key`. Its assertions fail the test.
        texts: The completions of the model, in order. All have to be asked for.
        abilities: Further abilities of the server.
        has_stops: Whether stop texts may end a completion early.
        loop: Arguments of the loop, such as `accept_as_wish`.
    """
    policy = Policy(texts)
    server = ScriptedServer(policy, streams=True, more_abilities=abilities)
    harness = ProgramHarness([server], loop=loop, prompt_length=32768, response_length=8192)
    trajectories = asyncio.run(harness.run(program))
    outputs = [trajectory.output for trajectory in trajectories]
    for output in outputs:
        assert output.failure is None, output.failure.traceback
        assert output.stop_reason is StopReason.ANSWERED
    assert len(policy.sampled) == len(texts)
    assert_sampled_once(outputs, policy.sampled, may_end_early=has_stops)
    return Recorded(outputs, prompts(server.requests))


def assert_sampled_once(
    outputs: Sequence[AgentLoopOutput], sampled: Iterable[Sequence[int]], *, may_end_early: bool
) -> None:
    """Check that the completions are the model segments of the outputs, each once and with mask 1."""
    segments = [s for output in outputs for s in output.segments if s.origin is Origin.MODEL]
    recorded, sampled = sorted(s.token_ids.tolist() for s in segments), sorted(map(list, sampled))
    assert len(recorded) == len(sampled)
    if may_end_early:
        sampled = [whole[: len(part)] for part, whole in zip(recorded, sampled, strict=True)]
    assert recorded == sampled
    assert sum(int(output.response_mask.sum()) for output in outputs) == sum(map(len, recorded))
