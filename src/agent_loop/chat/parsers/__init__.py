"""Tool parsers by name. Importing this package registers the ones that ship."""

from agent_loop.chat.parsers.base import ToolParser
from agent_loop.chat.parsers.hermes import HermesToolParser

__all__ = ["HermesToolParser", "ToolParser"]
