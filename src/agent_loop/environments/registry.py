"""Registry of the suites of tasks in this package."""

from __future__ import annotations

from collections.abc import Mapping

from agent_loop.environments.suite import TaskSuite
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.registries import construct, load_class

SUITES: Mapping[str, str] = {
    "agentdojo": "agent_loop.environments.agentdojo:AgentDojoSuite",
    "bfcl": "agent_loop.environments.bfcl.suite:BfclSuite",
    "gymnasium": "agent_loop.environments.gymnasium.suite:GymnasiumSuite",
    "reasoning_gym": "agent_loop.environments.reasoning_gym:ReasoningGymSuite",
    "openenv": "agent_loop.environments.openenv.suite:OpenEnvSuite",
    "tau2": "agent_loop.environments.tau2.suite:Tau2Suite",
    "textarena": "agent_loop.environments.textarena:TextArenaSuite",
    "verifiers": "agent_loop.environments.verifiers.suite:VerifiersSuite",
}
"""Suites by name. Each is imported when it is first used."""


def load_suite(name: str) -> TaskSuite:
    """Return the suite of a name.

    Raises:
        ConfigError: There is no such suite.
    """
    if name not in SUITES:
        raise ConfigError(f"there is no suite of tasks named {name!r}{did_you_mean(name, SUITES)}")
    return construct(load_class(SUITES[name], base=TaskSuite, key="suite"), where=f"suite {name!r}")
