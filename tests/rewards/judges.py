"""Judge with OpenAI's chat completions that a script answers."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from agent_loop.trajectory import AgentLoopOutput
from tests.interactions.endpoint import Endpoint, PreparedResponse, serving

Reply = str | int | None
"""Text of a completion, an error status, or None for no reply at all."""


@asynccontextmanager
async def judging(script: Callable[[list[dict[str, Any]]], Reply]) -> AsyncGenerator[Endpoint]:
    """Serve a judge on a free port until exit."""

    def respond(messages: list[dict[str, Any]]) -> PreparedResponse:
        reply = script(messages)
        if isinstance(reply, int):
            return PreparedResponse(status=reply)
        return PreparedResponse(reply, hangs=reply is None)

    async with serving(respond) as judge:
        yield judge


def flaky(
    script: Callable[[list[dict[str, Any]]], Reply], *, share: float, seed: int = 0
) -> Callable[[list[dict[str, Any]]], Reply]:
    """Return a script that replies to a random share of requests with an error status or with nonsense."""
    rng = random.Random(seed)

    def answer(messages: list[dict[str, Any]]) -> Reply:
        if rng.random() < share:
            return rng.choice([429, 500, 503, "I would say yes.", '{"answer": "maybe"}'])
        return script(messages)

    return answer


def answer(value: Any) -> str:
    return json.dumps({"answer": value})


def prompt_of(messages: list[dict[str, Any]]) -> str:
    return str(messages[-1]["content"])


def write_file(folder: Path, values: Mapping[str, Any]) -> str:
    """Write a reward file and return its path."""
    path = folder / "rubric.yaml"
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    return str(path)


@asynccontextmanager
async def judged_by(
    folder: Path, *scripts: Callable[[list[dict[str, Any]]], Reply], judge: Any = None, **settings: Any
) -> AsyncGenerator[tuple[str, list[Endpoint]]]:
    """Serve a judge for each script, without retries unless `judge` says so, and write the reward file of them."""
    async with AsyncExitStack() as stack:
        judges = [await stack.enter_async_context(judging(script)) for script in scripts]
        shared = {"model": "m", "max_retries": 0, **(judge or {})}
        values = {"judges": [{"base_url": each.url, **shared} for each in judges], **settings}
        yield write_file(folder, values), judges


def output_saying(text: str, *, question: str = "What is 2 + 2?") -> AgentLoopOutput:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
    return AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], messages=messages)
