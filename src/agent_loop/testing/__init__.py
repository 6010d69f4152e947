"""Virtual time for tests, and the harness that runs conformance checks."""

from agent_loop.testing.virtual_time import run_virtual

__all__ = ["run_virtual"]
