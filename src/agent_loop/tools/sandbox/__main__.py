"""Prints what shuts code in on this machine: `python -m agent_loop.tools.sandbox`."""

from __future__ import annotations

import sys

from agent_loop.errors import ConfigError
from agent_loop.tools.sandbox.host import SandboxHost
from agent_loop.tools.sandbox.settings import SandboxSettings


def main() -> None:
    """Exits with 1 where nothing shuts enough in."""
    try:
        host = SandboxHost(SandboxSettings())
    except ConfigError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{host.isolation}\n")
    host.close()


if __name__ == "__main__":
    main()
