"""Find the environment that a row names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agent_loop.environments.base import Environment
from agent_loop.environments.game import Game
from agent_loop.environments.tasks import SUITES, load_suite
from agent_loop.environments.trl import TrlClass
from agent_loop.errors import ConfigError, DataError, did_you_mean
from agent_loop.loading import load_object
from agent_loop.runtime.describe import describe_error, describe_value


@dataclass(frozen=True, slots=True)
class EnvironmentFactory:
    """Creates the environments of trajectories."""

    make: Callable[[], Environment | Game]
    """Returns a new environment or game."""
    where: str
    """Name of the environment in errors."""
    tool_names: frozenset[str] | None = None
    """Names of its tools. None if they are known only after its reset."""

    @classmethod
    def of(cls, make: Callable[[], Any], *, where: str) -> EnvironmentFactory:
        """Return the factory of a class.

        Args:
            make: A subclass of `Environment` or `Game`, or a class in TRL's form, without required arguments, or a
                function that returns an instance of one. It is called at once, to inspect an instance.
            where: Name of the environment in errors.
        """
        try:
            probe: Any = make()
        except Exception as error:
            raise ConfigError(
                f"{where}: creating an instance raised {describe_error(error)}; fix it"
            ) from error
        if isinstance(probe, Environment | Game):
            return cls(make, where)
        trl_class = TrlClass(make, probe, where=where)
        return cls(trl_class.environment, where, frozenset(tool.name for tool in trl_class.tools))


def load_environments(references: Mapping[str, str]) -> dict[str, EnvironmentFactory]:
    """Load environments, by the names that rows use for them."""
    environments: dict[str, EnvironmentFactory] = {}
    for name, reference in references.items():
        where = f"rollout.multi_turn.environments.{name} ({reference})"
        make: Any = load_object(reference, key=where)
        if not callable(make):
            raise ConfigError(f"{where} is {describe_value(make)}; name a class")
        environments[name] = EnvironmentFactory.of(cast("Callable[[], Any]", make), where=where)
    return environments


def find_environment(name: Any, *, known: Mapping[str, EnvironmentFactory]) -> EnvironmentFactory:
    """Return the environment that a row's column `environment` names."""
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if isinstance(name, str) and name in known:
        return known[name]
    if isinstance(name, str) and name in SUITES:
        return EnvironmentFactory(load_suite(name).environment, where=f"environment {name!r}")
    near = did_you_mean(str(name), known) or "; name one in rollout.multi_turn.environments"
    raise DataError(f"environment is {name!r}: no such environment{near}")
