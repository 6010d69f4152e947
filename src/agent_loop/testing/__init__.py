"""Helpers for tests of agent loops, tools and servers."""

from agent_loop.testing.virtual_time import run_virtual

__all__ = ["run_virtual"]
