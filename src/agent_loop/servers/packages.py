"""Optional engine packages. They are imported when a server needs them, and only in supported versions."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from packaging.specifiers import SpecifierSet

from agent_loop.errors import ConfigError


def import_engine(module: str, *, package: str, supported: str) -> Any:
    """Import a module of an engine's package."""
    found = require_version(package, supported=supported)
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{package} {found} is installed but cannot be imported: {error}") from error


def require_version(package: str, *, supported: str) -> str:
    """Return the installed version of a package without importing it."""
    found = installed_version(package)
    if found is None:
        raise ConfigError(
            f'agent_loop.servers.{package} needs {package}: pip install "{package}{supported}" (docs/engines.md)'
        )
    if not SpecifierSet(supported, prereleases=True).contains(found):
        raise ConfigError(
            f"{package} {found} is installed, but only {supported} is supported; install a supported version"
        )
    return found


def installed_version(package: str) -> str | None:
    """Return the version of the distribution that provides a top-level package, or None."""
    for distribution in packages_distributions().get(package, ()):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
