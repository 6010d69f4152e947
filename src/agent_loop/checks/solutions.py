"""Play known turns in an environment, and check tasks by name: the solution scores 1, and an empty turn less."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.checks.tasks import Attempt, TaskReport, problems_of, run_checks
from agent_loop.config import MultiTurnConfig
from agent_loop.environments.factory import EnvironmentFactory
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.environments.tasks import load_suite, parse_task_name, suite_rows
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import ConfigError
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.tiny_models.tokenizer import CHAT_TEMPLATE
from agent_loop.trajectory import Trajectory

LOOP = "environment_agent"
NO_SOLUTION = "the solution, since none is known"
MAX_TOKENS = 2**24
MARKS = ("<tool_call>", "</tool_call>", "<|im_end|>")


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
        partial(_check_row, suite, row, name=f"{row['data_source']} row {number}")
        for number, row in enumerate(islice(rows, limit), start=1)
    )
    return await run_checks(checks, concurrency=concurrency, on_report=on_report)


async def _check_row(suite: TaskSuite, row: Mapping[str, Any], *, name: str) -> TaskReport:
    """Play a row with one empty turn, and with its solution."""
    turns, solved = suite.solution(row), suite.solved_reward
    nothing = await _play(suite, row, ())
    solution = Attempt() if turns is None else await _play(suite, row, turns)
    best = solved if solved is None or solution.reward is None else solution.reward
    problems = problems_of(
        "doing nothing", nothing, wanted=f"less than {best}", accepts=lambda got: best is None or got < best
    )
    if turns is not None:
        problems += problems_of(
            "the solution", solution, wanted=f"{solved}", accepts=lambda got: solved is None or got >= solved
        )
    ignored = () if turns is not None else (NO_SOLUTION,)
    return TaskReport(name, None, nothing.reward, solution.reward, tuple(problems), ignored)


async def _play(suite: TaskSuite, row: Mapping[str, Any], turns: Sequence[SolutionTurn]) -> Attempt:
    trajectory = await play_turns(suite, row, turns)
    failure = trajectory.output.failure
    if failure is not None:
        return Attempt(output=failure.error)
    return Attempt(trajectory.reward, f"it ended with {trajectory.output.stop_reason}")


async def play_turns(suite: TaskSuite, row: Mapping[str, Any], turns: Sequence[SolutionTurn]) -> Trajectory:
    """Play model turns in the environment of a row, as a rollout plays completions, and return the trajectory.

    The trajectory ends after the last turn, if the environment does not end it before. If the last turn has calls, an
    empty turn follows their replies. The reward is the environment's.

    Args:
        suite: The row's suite, whose rows are played by `environment_agent`.
        row: A row of the suite.
        turns: The model's turns, each in one completion. Without turns, the model writes one empty turn.
    """
    if not turns or turns[-1].calls:  # the calls of the last turn that the limits allow would not run
        turns = [*turns, SolutionTurn()]
    limits = EpisodeLimits(
        prompt_length=MAX_TOKENS, response_length=MAX_TOKENS, max_assistant_turns=len(turns)
    )
    server = ScriptedServer([ScriptedReply(completion_of(turn)) for turn in turns])
    context = LoopContext(
        server_manager=AsyncLLMServerManager([server]),
        template=solution_template(),
        limits=limits,
        multi_turn=MultiTurnConfig(max_tool_response_length=MAX_TOKENS),
        environments={suite.name: EnvironmentFactory(suite.environment, where=f"environment {suite.name!r}")},
    )
    worker = AgentLoopWorker(context, loops=LoopRegistry(), default_agent_loop=LOOP)
    played = {**row, "agent_name": LOOP, "environment": suite.name}
    [trajectory] = await worker.run([Job(played, group=0, rollout=0, sampling_params={"temperature": 1.0})])
    return trajectory


@cache
def solution_template() -> ChatTemplate:
    """Return the template that solutions are played with."""
    return ChatTemplate(placeholder_tokenizer(CHAT_TEMPLATE), tool_parser="hermes")


def completion_of(turn: SolutionTurn) -> list[int]:
    """Return the tokens of a turn. Only the marks of its calls and of its end are control tokens."""
    template = solution_template()
    begin, end, end_of_turn = template.tokenizer.convert_tokens_to_ids(MARKS)
    ids = template.encode(turn.text) if turn.text else []
    for call in turn.calls:
        text = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        ids += [begin, *template.encode(f"\n{text}\n"), end]
    return [*ids, end_of_turn]
