"""Play known turns in an environment, and check tasks by name: the solution scores 1, and an empty turn less."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.checks.tasks import TaskReport, run_checks
from agent_loop.config import MultiTurnConfig
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.environments.tasks import load_suite, parse_task_name, suite_rows
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import ConfigError
from agent_loop.loops.base import LoopContext
from agent_loop.loops.environment_agent import EnvironmentAgentLoop
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.trajectory import Trajectory
from agent_loop.types import ToolCall

LOOP = "environment_agent"
NO_SOLUTION = "the solution, since none is known"
MAX_TOKENS = 2**24
CALL_MARKS = ("<tool_call>", "</tool_call>")
END_MARK = "<|im_end|>"
CHAT_TEMPLATE = """\
{%- set given = messages[0].content if messages[0].role == 'system' else '' %}
{%- if given or tools %}
    {{- '<|im_start|>system\\n' + given }}
    {%- if tools %}
        {{- '\\n\\nTools, one per line:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with tool calls in the form of Hermes."""


async def check_named_tasks(
    name: str,
    *,
    limit: int | None = None,
    concurrency: int = 1,
    on_report: Callable[[TaskReport], None] | None = None,
) -> list[TaskReport]:
    """Play every row of a task twice: with its solution, and with one empty turn.

    Args:
        name: `suite:task?option=value&option=value`.
        limit: Number of rows to check. None checks all.
        concurrency: Number of rows that are checked at once.
        on_report: Called with each report as soon as it is known.
    """
    suite = load_suite(name.partition(":")[0])
    if suite.agent_name != LOOP:
        raise ConfigError(
            f"{name}: its rows are played by the loop {suite.agent_name!r}, which needs a model; use agent-loop eval"
        )
    rows = suite_rows(suite, parse_task_name(name, suite=suite))
    checks = (
        partial(check_row, suite, row, name=f"{row['data_source']} row {number}")
        for number, row in enumerate(islice(rows, limit), start=1)
    )
    return await run_checks(checks, concurrency=concurrency, on_report=on_report)


async def check_row(suite: TaskSuite, row: Mapping[str, Any], *, name: str) -> TaskReport:
    """Play a row with its solution, and with one empty turn."""
    clock = asyncio.get_running_loop().time
    started = clock()
    nothing, problems = await _play(suite, row, (), what="doing nothing")
    turns, solution = suite.solution(row), None
    if turns is not None:
        solution, faults = await _play(suite, row, turns, what="the solution")
        problems += faults
    problems += _wrong_rewards(suite.solved_reward, nothing=nothing, solution=solution)
    return TaskReport(
        name,
        nothing=nothing,
        solution=solution,
        problems=tuple(problems),
        ignored=() if turns is not None else (NO_SOLUTION,),
        seconds=clock() - started,
    )


def _wrong_rewards(solved: float | None, *, nothing: float | None, solution: float | None) -> list[str]:
    if solved is None:
        return []
    problems: list[str] = []
    if solution is not None and solution < solved:
        problems.append(f"the solution scores {solution:g} instead of {solved:g}")
    best = solved if solution is None else solution
    if nothing is not None and nothing >= best:
        problems.append(f"doing nothing scores {nothing:g}, no less than {best:g}")
    return problems


async def _play(
    suite: TaskSuite, row: Mapping[str, Any], turns: Sequence[SolutionTurn], *, what: str
) -> tuple[float | None, list[str]]:
    """Play turns, and return the reward and what went wrong."""
    trajectory = await play_turns(suite, row, turns)
    if trajectory.output.failure is not None:
        return None, [f"{what} fails: {trajectory.output.failure.error}"]
    if trajectory.reward is None:
        return None, [f"{what} has no reward; it ended with {trajectory.output.stop_reason}"]
    return trajectory.reward, []


async def play_turns(suite: TaskSuite, row: Mapping[str, Any], turns: Sequence[SolutionTurn]) -> Trajectory:
    """Play model turns in the environment of a row, as a rollout plays completions, and return the trajectory.

    The trajectory ends after the last turn, if the environment does not end it before. If the last turn has calls, an
    empty turn follows their replies. The reward is the environment's.

    Args:
        suite: The row's suite, whose rows are played by `environment_agent`.
        row: A row of the suite.
        turns: The model's turns, each in one completion. Without turns, the model writes one empty turn.
    """
    if suite.agent_name != LOOP:
        raise ConfigError(f"rows of {suite.name!r} are played by {suite.agent_name!r}, which needs a model")
    if not turns or turns[-1].calls:  # the calls of the last turn that the limits allow would not run
        turns = [*turns, SolutionTurn()]
    completions = [completion_of(turn) for turn in turns]
    worker = _worker(suite, completions)
    played = {**row, "agent_name": LOOP, "environment": suite.name}
    [trajectory] = await worker.run([Job(played, group=0, rollout=0, sampling_params={"temperature": 1.0})])
    return trajectory


def completion_of(turn: SolutionTurn) -> list[int]:
    """Return the tokens of a turn. Only the marks of its calls and of its end are control tokens."""
    template = solution_template()
    ids = template.encode(turn.text) if turn.text else []
    for call in turn.calls:
        ids += _call_ids(call, template=template)
    return [*ids, *_control_ids(template, END_MARK)]


@cache
def solution_template() -> ChatTemplate:
    """Return the template that solutions are played with."""
    return ChatTemplate(placeholder_tokenizer(CHAT_TEMPLATE), tool_parser="hermes")


def _call_ids(call: ToolCall, *, template: ChatTemplate) -> list[int]:
    begin, end = (_control_ids(template, mark) for mark in CALL_MARKS)
    text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return [*begin, *template.encode(f"\n{text}\n"), *end]


def _control_ids(template: ChatTemplate, mark: str) -> list[int]:
    return [template.tokenizer.convert_tokens_to_ids(mark)]


def _worker(suite: TaskSuite, completions: Sequence[list[int]]) -> AgentLoopWorker:
    server = ScriptedServer([ScriptedReply(ids) for ids in completions])
    limits = EpisodeLimits(
        prompt_length=MAX_TOKENS, response_length=MAX_TOKENS, max_assistant_turns=len(completions)
    )
    context = LoopContext(
        server_manager=AsyncLLMServerManager([server]),
        template=solution_template(),
        limits=limits,
        multi_turn=MultiTurnConfig(max_tool_response_length=MAX_TOKENS),
        environments={suite.name: EnvironmentFactory(suite.environment, where=f"environment {suite.name!r}")},
    )
    return AgentLoopWorker(context, loops=_loops(), default_agent_loop=LOOP)


@cache
def _loops() -> LoopRegistry:
    assert EnvironmentAgentLoop  # its import registers the loop
    return LoopRegistry()
