"""Script that prints what a sandbox of an unprivileged process can reach."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile

from agent_loop.tools.python import PythonTool
from tests.tools.sandboxes import ask

ATTEMPTS = [
    "open({secret!r})",
    "import os; os.chmod({secret!r}, 0o600)",
    "import os; os.utime({secret!r})",
    "import os; os.truncate({secret!r}, 0)",
    "import os; os.unlink({secret!r})",
    "import os; os.kill({agent}, 0)",
    "import os; os.kill(os.getppid(), 0)",
    "open('/proc/{agent}/environ')",
    "import socket; socket.socket(socket.AF_UNIX)",
    "import os\nwhile True:\n    if os.fork() == 0: os.setsid()",
]


async def main() -> None:
    tool = PythonTool({"python": sys.executable, "max_processes": 16, "time_limit_s": 5.0})
    await tool.create("i")
    with tempfile.NamedTemporaryFile() as secret:
        for attempt in ATTEMPTS:
            answer = await ask(tool, "i", attempt.format(secret=secret.name, agent=os.getpid()))
            sys.stdout.write(f"{answer.is_error} {answer.text.splitlines()[-1]}\n")
    sys.stdout.write(f"{(await ask(tool, 'i', '6 * 7')).text}\n")
    await tool.release("i")


if __name__ == "__main__":
    asyncio.run(main())
