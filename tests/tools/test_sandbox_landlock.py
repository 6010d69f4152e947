"""Sandboxes under Landlock: limits that the supervisor enforces, older kernels, and containers."""

import asyncio
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Generator
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.tools.python import PythonTool
from agent_loop.tools.sandbox.inside import landlock
from agent_loop.tools.sandbox.inside.spec import SCOPED_SIGNALS_VERSION
from agent_loop.tools.sandbox.settings import SandboxSettings
from tests.tools.sandboxes import (
    SMALL,
    ask,
    descendants,
    ends,
    is_open_to_all,
    left_running,
    python_tool,
    running,
    talk,
)

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
USER_ID = 54_321


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Provide the parent folder of the sandboxes' folders, and check that none is left."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)
        assert os.listdir(path) == []


FILL = "for i in range(100):\n    with open(f'{i}', 'wb') as file: file.write(bytes(2**20))\n"


@pytest.mark.parametrize(
    "code",
    [
        FILL + "import time; time.sleep(10)",
        "files = []\nfor i in range(16):\n    files.append(open('f', 'wb')); files[-1].write(bytes(2**20))\n"
        "    files[-1].flush()\n    os.unlink('f')\ntime.sleep(10)",
        "for i in range(10_000): open(str(i), 'w').close()\ntime.sleep(10)",
        "for i in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\ntime.sleep(10)",
        "os.mkdir('hidden', 0); time.sleep(10)",
    ],
    ids=["much", "removed and open", "many", "deep", "hidden"],
)
def test_files_over_the_limit_are_reported_and_removed(code: str, folder: Path) -> None:
    full, after, last = talk(f"import os, time\n{code}", "import os; os.listdir()", "1 + 1")
    assert "files took more than 8 MB; they were removed and its processes killed" in full.text
    assert full.text.endswith("variables, imports and files are lost.")
    assert [after.text, last.text] == ["[]", "2"]


def test_files_that_a_thread_writes_between_calls_are_counted(folder: Path) -> None:
    wait = "    time.sleep(0.05)\n" + textwrap.indent(FILL, "    ") + "    time.sleep(100)\n"
    code = (
        f"import os, threading, time\ndef fill():\n{wait}threading.Thread(target=fill).start()\nos.getpid()"
    )
    tool = python_tool()

    async def main() -> str:
        await tool.create("i")
        interpreter = await ask(tool, "i", code)
        assert ends(int(interpreter.text))
        answer = await ask(tool, "i", "1 + 1")
        await tool.release("i")
        return answer.text

    assert "Since the last call, the code's files took more than 8 MB" in asyncio.run(main())


def test_folders_of_the_host_cannot_be_listed() -> None:
    paths = ("/", "/proc", "/tmp", "/root", "/sys", "/etc")
    answers = talk(*(f"import os; os.listdir({path!r})" for path in paths))
    assert all("PermissionError" in answer.text for answer in answers)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, which gives sandboxes users of their own")
@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_older_kernels_suffice_if_sandboxes_have_their_own_users(
    version: int, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    python_tool()
    monkeypatch.setattr(landlock, "version", lambda: version)
    before, marker = descendants(), f"{os.getpid()}.{version}"
    kill_the_supervisor = (
        f"import os, subprocess; subprocess.Popen(['sleep', '{marker}'], start_new_session=True)\n"
        "os.kill(os.getppid(), 9)\nwhile True: pass"
    )

    async def main() -> list[str]:
        tool = PythonTool(SMALL)
        await tool.create("i")
        codes = ["open('/etc/passwd')", "import os; os.truncate('x', 0)", kill_the_supervisor, "6 * 7"]
        answers = [(await ask(tool, "i", code)).text for code in codes]
        await tool.release("i")
        return answers

    read, truncated, killed, after = asyncio.run(main())
    assert "PermissionError: [Errno 13]" in read
    assert "PermissionError: [Errno 1]" in truncated
    assert killed.startswith("The sandbox failed: its supervisor terminated")
    assert after.endswith("42")
    assert running(marker) == []
    assert left_running(before) == set()


@pytest.mark.parametrize(
    ("version", "user_id", "says"), [(0, 0, "it has no Landlock"), (5, 1000, "does not contain signals")]
)
def test_kernels_without_sufficient_landlock_are_refused_with_the_reason(
    version: int, user_id: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: version)
    monkeypatch.setattr(os, "geteuid", lambda: user_id)
    with pytest.raises(ConfigError, match=says):
        SandboxSettings().spec()


def contained(user_id: int, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command as in a container without the right to create namespaces."""
    python = sys.executable if user_id == os.geteuid() else SMALL["python"]
    folders = [str(REPOSITORY), *(path for path in sys.path if path.endswith(("src", "site-packages")))]
    if user_id != os.geteuid() and not all(is_open_to_all(folder) for folder in folders):
        pytest.skip(f"users without privileges may not read one of {folders}")
    return subprocess.run(
        [sys.executable, "-m", "tests.tools.container", str(user_id), python, "-B", *command],
        cwd=REPOSITORY,
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )


VISIT = """
import asyncio, os, sys, tempfile
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
    "import os\\nwhile True:\\n    if os.fork() == 0: os.setsid()",
    "6 * 7",
]

async def main():
    tool = PythonTool({"python": sys.executable, "max_processes": 16, "time_limit_s": 5.0})
    await tool.create("i")
    with tempfile.NamedTemporaryFile() as secret:
        for attempt in ATTEMPTS:
            answer = await ask(tool, "i", attempt.format(secret=secret.name, agent=os.getpid()))
            print(answer.is_error, answer.text.splitlines()[-1])
    await tool.release("i")

asyncio.run(main())
"""


@pytest.mark.timeout(400)
def test_the_escapes_fail_in_a_container_too() -> None:
    python_tool()
    options = ["-m", "slow", "-k", "Reading or Reaching or Leaving", "-p", "no:cacheprovider"]
    escapes = ["-m", "pytest", *options, "tests/tools/test_sandbox_escapes.py"]
    ran = contained(os.geteuid(), *escapes)
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become a user without privileges")
def test_an_unprivileged_user_is_isolated_in_a_container_too() -> None:
    python_tool()
    if landlock.version() < SCOPED_SIGNALS_VERSION:
        pytest.skip("NO SANDBOX HERE for users without privileges: the kernel is older than Linux 6.12")
    ran = contained(USER_ID, "-c", VISIT, "a visitor", HOME="/")
    assert ran.returncode == 0, ran.stderr
    *attempts, killed, alive = ran.stdout.splitlines()
    assert len(attempts) == 9
    assert [line for line in attempts if not line.startswith(("True PermissionError", "True OSError"))] == []
    assert killed.startswith("True The code ran more than 16 processes, and they were killed")
    assert alive == "False 42"
    assert running("a visitor") == []
