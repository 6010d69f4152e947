"""Engine packages, which are optional: imported when a server of theirs is made, and only in versions known to work."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from packaging.specifiers import SpecifierSet

from agent_loop.errors import ConfigError


def import_engine(module: str, *, package: str, supported: str) -> Any:
    """Imports a module of an engine's package.

    Args:
        module: As in `vllm.v1.engine.async_llm`.
        package: The top-level package, as in `vllm`.
        supported: The versions that are known to work, as in `>=0.12,<0.33`.

    Raises:
        ConfigError: The package is missing, broken, or of another version.
    """
    found = require_version(package, supported=supported)
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{package} {found} is installed but cannot be imported: {error}") from error


def require_version(package: str, *, supported: str) -> str:
    """The installed version, without importing anything.

    Raises:
        ConfigError: The package is missing, or of another version.
    """
    found = installed_version(package)
    if found is None:
        raise ConfigError(
            f'agent_loop.servers.{package} needs {package}: pip install "{package}{supported}" (docs/engines.md)'
        )
    if not SpecifierSet(supported, prereleases=True).contains(found):
        raise ConfigError(
            f"{package} {found} is installed, but only {supported} is supported; install one of those"
        )
    return found


def installed_version(package: str) -> str | None:
    """The version of the distribution that provides a top-level package; None if there is none."""
    for distribution in packages_distributions().get(package, ()):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
