"""Project folder with a tokenizer, a scripted model, a tool and a configuration, for rollouts with known tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import Config, parse_section
from tests.helpers import small_tokenizer, user

OTHER_PROJECTS = pytest.mark.filterwarnings("ignore:agent loop .* replaces it:UserWarning")
"""For tests of several projects in one process, each with loops of the same names."""

SCRIPT = '''
import json
import random
import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from agent_loop.servers.scripted import ScriptedReply

FOLDER = Path(__file__).parent
FIRST = 100


@cache
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "model" / "tokenizer.json"))


@cache
def reply_to(number, turn, num_turns):
    arguments = json.dumps({"name": "add", "arguments": {"a": number, "b": turn}})
    text = f"<tool_call>\\n{arguments}\\n</tool_call>" if turn < num_turns else f"it is {number + turn}"
    return tuple(tokenizer().encode(text + "<|im_end|>", add_special_tokens=False).ids)


def answer(request, *, num_turns=3, latency_s=0.0):
    """Depends only on the prompt: on the number of tool results and the row's number."""
    ids = request.prompt_ids
    turn = int((ids == tokenizer().token_to_id("<tool_response>")).sum())
    text = tokenizer().decode(ids.tolist(), skip_special_tokens=False)
    number = int(text.split("number ")[1].split("?")[0])
    token_ids = reply_to(number, turn, num_turns)
    noise = zlib.crc32(f"{number}/{turn}".encode()) % 1000 / 1000
    logprobs = [-(number % 7 + turn + 1) / 8] * len(token_ids)
    return ScriptedReply(token_ids, logprobs=logprobs, latency_s=latency_s * (0.5 + noise))


def slow_answer(request):
    return answer(request, latency_s=float((FOLDER / "latency.txt").read_text()))


def random_answer(request):
    """As `slow_answer`, but begins with random tokens."""
    reply = slow_answer(request)
    thought = tokenizer().encode(f"I think {random.random()}", add_special_tokens=False).ids
    token_ids = [*thought, *reply.token_ids]
    return replace(reply, token_ids=token_ids, logprobs=[-random.random() for _ in token_ids])


def counts(request):
    """Count to 60, from the last token of the prompt if it is a count; 4 numbers a second."""
    last = int(request.prompt_ids[-1]) - FIRST
    start = last + 1 if 0 <= last < 60 else 0
    with open(FOLDER / "counted_from.log", "a") as file:
        file.write(f"{start}\\n")
    token_ids = [FIRST + number for number in range(start, 60)]
    return ScriptedReply(token_ids, latency_s=len(token_ids) / 4)


def scorer(token_ids):
    """Depends only on the tokens."""
    return [-float(token % 7) - 0.5 for token in token_ids[1:].tolist()]


def hangs(request):
    return ScriptedReply([1], latency_s=float("inf"))
'''

TASK = '''
import os
from agent_loop import AgentLoopBase, function_tool, register


@function_tool
async def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: First.
        b: Second.
    """
    return a + b


def reward(output, row):
    return {"reward": float(row["number"]), "pid": os.getpid()}


@register("returns_a_function")
class ReturnsAFunction(AgentLoopBase):
    async def run(self, sampling_params, **row):
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            return episode.output(extra_fields={"a_function": lambda: None})


@register("kills_its_worker")
class KillsItsWorker(AgentLoopBase):
    async def run(self, sampling_params, **row):
        os.kill(os.getpid(), 9)


@register("two_ways")
class TwoWays(AgentLoopBase):
    async def run(self, sampling_params, **row):
        async with self.episode(row["raw_prompt"]) as first:
            async with first.branch() as second:
                await first.generate(sampling_params)
                await second.generate(sampling_params)
                return [first.output(), second.output()]
'''


def make_project(folder: Path) -> Path:
    small_tokenizer().save_pretrained(folder / "model")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    set_latency(folder, 0.0)
    return folder


def set_latency(folder: Path, seconds: float) -> None:
    """Set the mean latency of the next completions. Latencies vary by half of the mean."""
    (folder / "latency.txt").write_text(str(seconds), encoding="utf-8")


def make_config(
    folder: Path,
    *,
    runtime: str = "ray",
    script: str = "slow_answer",
    streams: bool = False,
    num_servers: int = 4,
    num_workers: int = 4,
    max_row_restarts: int = 5,
    tools: str | None = None,
) -> Config:
    rollout: dict[str, Any] = {
        "engine": "scripted",
        "engine_kwargs": {
            "script": f"{folder}/script.py:{script}",
            "scorer": f"{folder}/script.py:scorer",
            "streams": streams,
        },
        "num_servers": num_servers,
        "prompt_length": 1024,
        "response_length": 2048,
        "agent": {
            "num_workers": num_workers,
            "default_agent_loop": "tool_agent",
            "loop_files": [f"{folder}/task.py"],
        },
        "multi_turn": {"tools": [tools or f"{folder}/task.py:add"], "max_assistant_turns": 6},
    }
    values = {
        "model": {"path": f"{folder}/model"},
        "reward": {"function": f"{folder}/task.py:reward"},
        "rollout": rollout,
        "trainer": {
            "runtime": runtime,
            "ray": {
                "num_cpus_per_worker": 0.01,
                "num_cpus_per_server": 0.01,
                "max_row_restarts": max_row_restarts,
            },
        },
    }
    return parse_section(Config, values, where="test")


def rows(count: int) -> list[dict[str, Any]]:
    return [{"raw_prompt": user(f"number {n}?"), "number": n} for n in range(count)]
