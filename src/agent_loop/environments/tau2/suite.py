"""tau2-bench as a suite of tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from agent_loop.config import NotNegative, PositiveSeconds, Section, Temperature, Tokens
from agent_loop.environments.base import Environment
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.environments.tau2.domains import DOMAINS, EXTRA, check_installed, load_domain
from agent_loop.environments.tau2.environment import Tau2Environment
from agent_loop.environments.tau2.scoring import REWARD_PARTS
from agent_loop.environments.tau2.users import ServedUser
from agent_loop.errors import ConfigError
from agent_loop.types import ToolCall

INSTRUCTIONS = """\
<instructions>
You work in customer service. Help the customer as far as the <policy> below allows.
In each turn, either write to the customer or call tools.
</instructions>
"""


class Tau2Options(Section):
    """Options of the domains."""

    user: Literal["scripted", "model"] = "scripted"
    """Who plays the user: `model` is a language model behind `user_url`. `scripted` needs none, and is for checks."""
    user_url: str | None = None
    """URL of an endpoint with OpenAI's chat completions, such as `http://127.0.0.1:8000/v1`."""
    user_model: str | None = None
    """Name of the user's model at the endpoint."""
    user_key_env: str | None = None
    """Environment variable that holds the API key. None if the endpoint needs no key."""
    user_temperature: Temperature = 0.0
    """Sampling temperature of the user's model."""
    user_max_tokens: Tokens = 512
    """Maximum number of tokens in one reply of the user."""
    user_timeout_s: PositiveSeconds = 60.0
    """Time limit for one attempt at a reply of the user."""
    user_max_retries: NotNegative = 3
    """Number of retries of a request to the user's model."""


class Tau2Suite(TaskSuite):
    """Domains of tau2-bench. The reward is that of the benchmark's own scorers."""

    name = "tau2"
    extra = EXTRA
    summary = "customer service of tau2-bench: a policy, tools on a data base, and a user"
    options: ClassVar[type[Section]] = Tau2Options
    reward_parts: ClassVar[Mapping[str, str]] = REWARD_PARTS

    def tasks(self) -> Sequence[str]:
        check_installed()
        return DOMAINS

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        domain, user = load_domain(task), _served_user(options)
        system = {"role": "system", "content": INSTRUCTIONS + domain.policy}
        for task_id in domain.samples:
            yield {"raw_prompt": [system], "task": {"domain": task, "id": task_id, "user": user}}

    def environment(self) -> Environment:
        return Tau2Environment()

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn]:
        """Return the gold actions in one turn, and a turn that tells the user what they should be told."""
        criteria: Any = load_domain(row["task"]["domain"]).task(row["task"]["id"]).evaluation_criteria
        calls = tuple(ToolCall(action.name, action.arguments) for action in criteria.actions or ())
        text = "; ".join(criteria.communicate_info or ()) or "Done."
        return [*([SolutionTurn(calls=calls)] if calls else []), SolutionTurn(text=text)]

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"{row['task']['domain']} {row['task']['id']}"


def _served_user(options: Tau2Options) -> dict[str, Any] | None:
    """Return the settings of the user's model as plain values, or None for a scripted user.

    Raises:
        ConfigError: The URL or the model is missing, or given for a scripted user.
    """
    if options.user == "scripted":
        if options.user_url is not None or options.user_model is not None:
            raise ConfigError("tau2: user_url or user_model is set for a scripted user; add user=model")
        return None
    if options.user_url is None or options.user_model is None:
        raise ConfigError(
            "tau2: user=model needs user_url and user_model, the server and the name of the user's model"
        )
    served = ServedUser(
        url=options.user_url,
        model=options.user_model,
        key_env=options.user_key_env,
        temperature=options.user_temperature,
        max_tokens=options.user_max_tokens,
        timeout_s=options.user_timeout_s,
        max_retries=options.user_max_retries,
    )
    return served.model_dump()
