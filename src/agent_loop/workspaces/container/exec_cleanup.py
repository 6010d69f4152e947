"""Ends the processes that a command left in a container when its client was killed."""

from __future__ import annotations

from agent_loop.workspaces.container.container import Container

KILL_SCRIPT = """
for round in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19; do
    found=
    for file in $(grep -ls -e "$1" /proc/[0-9]*/environ); do
        number=${file#/proc/}
        found="$found ${number%/environ}"
    done
    [ -z "$found" ] && exit 0
    kill -9 $found 2>/dev/null
done
exit 1
"""
"""Kills all processes whose environment has a mark, until none is found. Processes may fork while they are killed."""


async def kill_marked(container: Container, mark: str) -> bool:
    """Kill the processes of a container whose environment has a mark. Return whether all have ended."""
    arguments = ["exec", "--user", "0", "--privileged", container.name, "sh", "-c", KILL_SCRIPT, "sh", mark]
    result = await container.command_line.run(*arguments, timeout_s=30.0)
    return result.exit_code == 0
