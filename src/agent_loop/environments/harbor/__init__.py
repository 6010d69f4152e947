"""Tasks in the folder format of Harbor and Terminal-Bench 2."""

from agent_loop.environments.harbor.folders import find_tasks
from agent_loop.environments.harbor.task import HarborTask, read_task

__all__ = ["HarborTask", "find_tasks", "read_task"]
