"""OpenEnv servers as a suite of tasks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from agent_loop.config import PositiveSeconds, Section
from agent_loop.environments.base import Environment
from agent_loop.environments.openenv.environment import OpenEnvEnvironment
from agent_loop.environments.suite import SizedOptions, TaskSuite
from agent_loop.errors import ConfigError


class OpenEnvOptions(SizedOptions):
    """Options of a server. Row `k` resets the environment with the seed `seed + k`."""

    instruction: str = ""
    """Text before the first observation."""
    reset: str = "{}"
    """Further arguments of the environment's reset, as a JSON object."""
    reward: Literal["sum", "last"] = "sum"
    """Reward of a trajectory: the sum of the rewards of its steps, or the last one."""
    wait_s: PositiveSeconds = 60.0
    """How long a trajectory waits for a server that accepts a session."""


class OpenEnvSuite(TaskSuite):
    """Environments behind OpenEnv servers."""

    name = "openenv"
    extra = ""
    summary = "a running OpenEnv server: openenv:http://HOST:PORT, or several URLs with commas between them"
    options: ClassVar[type[Section]] = OpenEnvOptions
    reward_parts: ClassVar[Mapping[str, str]] = {
        "num_steps": "number of steps that the server executed",
        "is_done": "whether the server ended the episode",
    }
    lists_tasks = False

    def tasks(self) -> Sequence[str]:
        return ()

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        urls = [url.strip().rstrip("/") for url in task.split(",")]
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"openenv:{task}: {url!r} is not a URL; give openenv:http://HOST:PORT")
        reset = _json_object(options.reset, where=f"openenv:{task}: reset")
        for seed in itertools.count(options.seed):
            yield {
                "raw_prompt": [{"role": "user", "content": options.instruction}],
                "task": {
                    "urls": urls,
                    "reset": {"seed": seed, **reset},
                    "reward": options.reward,
                    "wait_s": options.wait_s,
                },
            }

    def environment(self) -> Environment:
        return OpenEnvEnvironment()

    def identity(self, row: Mapping[str, Any]) -> str:
        return json.dumps(row["task"]["reset"], sort_keys=True)


def _json_object(text: str, *, where: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is {text!r}, which is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {text!r}; give a JSON object")
    return cast(dict[str, Any], value)
