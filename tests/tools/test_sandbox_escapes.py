"""Code that attempts to escape, to exceed limits or to leave processes.

After each attempt, the same trajectory and the next one work, and no process is left running.
"""

import asyncio
import os
import random
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.tools.sandboxes import HASTY, SECRET, ask, python_tool, running, talk

pytestmark = pytest.mark.slow

SUICIDE = "import os\ntry:\n    os.kill(-1, 9)\nfinally:\n    os.kill(os.getpid(), 9)"
ALIVE = "print('still', 'here')"
COUNTED = "ran more than 16 processes, and they were killed"
"""Message where the supervisor counts processes, since the kernel counts them with those of the agent's user."""


def only(code: str, **settings: object) -> str:
    """Return the answer to code that ends by itself, and check that its interpreter continues."""
    answer, after = talk(code, ALIVE, **settings)
    assert after.text == "still here"
    return answer.text


def is_refused(text: str, *others: str) -> bool:
    """Return whether code ended with an error of a missing or forbidden file or process, or one of the others."""
    errors = ("FileNotFoundError", "PermissionError", "ProcessLookupError", *others)
    return text.splitlines()[-1].startswith(errors)


def lost(code: str, **settings: object) -> str:
    """Return the answer to code that kills its interpreter. The next call has a new one, the files and no state."""
    kept, answer, after = talk(
        "kept = 1; open('kept', 'w').close()",
        code,
        "import os; print('kept' in globals(), os.path.exists('kept'))",
        **settings,
    )
    assert not kept.is_error
    assert answer.is_error
    assert after.text == "False True"
    assert "variables and imports are lost, files are kept" in answer.text
    return answer.text


class TestTakingTooMuch:
    @pytest.mark.parametrize(
        ("code", "says"),
        [
            (
                "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(1000)",
                "BlockingIOError: [Errno 11]",
            ),
            (
                "import threading, time\n"
                "while True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
                "can't start new thread",
            ),
            ("import os; os.memfd_create('memory that is not counted')", "PermissionError"),
            ("open('big', 'wb').write(bytes(5 * 2**20))", "OSError: [Errno 27] File too large"),
            (
                "import os\ntaken = []\nwhile True: taken.append(os.open('/dev/null', 0))",
                "OSError: [Errno 24] Too many open files",
            ),
        ],
        ids=["processes", "threads", "hidden memory", "file", "open files"],
    )
    def test_code_at_a_limit_gets_an_error(self, code: str, says: str) -> None:
        text = only(code)
        assert says in text or COUNTED in text

    @pytest.mark.parametrize(
        ("code", "settings", "says"),
        [
            (
                "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
                HASTY,
                "did not stop at the time limit of 0.5 s and was killed",
            ),
            (
                "import os, time\n"
                "for _ in range(4):\n"
                "    if os.fork() == 0:\n"
                "        data = bytearray(100 * 2**20); data[::4096] = b'x' * len(data[::4096]); time.sleep(1000)\n"
                "time.sleep(1000)",
                {},
                "used more than 256 MB of memory and were killed",
            ),
            ("while True: pass", {"cpu_seconds": 1}, "used more than 1 s of CPU time"),
        ],
        ids=["fork bomb that ignores errors", "memory of all processes", "cpu time"],
    )
    def test_code_that_goes_on_at_a_limit_is_killed(
        self, code: str, settings: dict[str, object], says: str
    ) -> None:
        text = lost(code, **settings)
        assert says in text or COUNTED in text

    def test_a_large_allocation_raises_memory_error_and_the_state_is_kept(self) -> None:
        _, bomb, after = talk("x = 5", "data = []\nwhile True: data.append(bytearray(10**7))", "x")
        assert bomb.text.endswith("MemoryError")
        assert after.text == "5"

    def test_a_gigabyte_of_output_is_truncated_while_it_is_received(self) -> None:
        code = "import os\nfor _ in range(1024): os.write(1, bytes(2**20))\nprint('the end')"
        text = only(code, output_limit_bytes=1000)
        assert "[... 1073740832 bytes of output left out ...]" in text
        assert text.endswith("the end")
        assert len(text) < 1100


class TestRunningForEver:
    def test_a_python_loop_is_interrupted_and_the_state_is_kept(self) -> None:
        _, endless, after = talk("x = 5", "while True: pass", "x", **HASTY)
        assert endless.text.endswith("was interrupted at the time limit of 0.5 s; variables are kept.")
        assert after.text == "5"

    @pytest.mark.parametrize(
        "code",
        [
            "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
            "sum(range(10 ** 15))",
            "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        ],
        ids=["ignores the signal", "holds the interpreter in C", "stops itself"],
    )
    def test_code_that_ignores_the_interrupt_is_killed(self, code: str) -> None:
        assert "did not stop at the time limit of 0.5 s and was killed" in lost(code, **HASTY)


class TestReadingWhatIsNotItsOwn:
    @pytest.mark.parametrize(
        "path",
        ["/etc/shadow", "/proc/1/environ", "/proc/AGENT/environ", "/proc/1/mem", "/proc/kcore", __file__],
    )
    def test_files_of_the_host_and_of_the_agent_cannot_be_read(self, path: str) -> None:
        path = path.replace("AGENT", str(os.getpid()))
        assert is_refused(only(f"open({path!r}, 'rb').read(1)"))

    def test_no_visible_environment_contains_the_agents_variables(self) -> None:
        code = (
            "import os\nfound = [dict(os.environ)]\n"
            "for name in range(1, 2**16):\n"
            "    try: found.append(open(f'/proc/{name}/environ').read())\n"
            "    except OSError: pass\n"
            "print(found)"
        )
        text = only(code)
        assert SECRET not in text
        assert "AGENT_LOOP" not in text

    def test_no_descriptor_of_the_agent_is_inherited(self, tmp_path: Path) -> None:
        with open(tmp_path / "open", "w") as file:
            os.set_inheritable(file.fileno(), True)
            code = (
                "import os, stat\n"
                "for n in range(64):\n"
                "    try: print(n, stat.filemode(os.fstat(n).st_mode)[0])\n"
                "    except OSError: pass"
            )
            assert only(code).splitlines() == ["0 c", "1 p", "2 p", "3 p", "4 p", "5 p"]

    def test_sandboxes_cannot_see_each_other(self) -> None:
        marker = uuid4().hex
        talk(f"open('{marker}', 'w').close()")
        own = "import os, tempfile; folder = os.path.dirname(tempfile.gettempdir())"
        assert marker not in only(f"{own}; print(folder, list(os.walk(folder)))")


@pytest.fixture
def host_file() -> Generator[str]:
    """Create a file outside that every user of this machine may read, write, run and move."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = Path(folder, "program")
        path.write_text(f"#!/bin/sh\necho {SECRET}\n")
        path.chmod(0o777)
        yield str(path)
        assert path.stat().st_mode & 0o777 == 0o777
        assert SECRET in path.read_text()


class TestWaysAround:
    @pytest.mark.parametrize(
        "code",
        [
            "print(open(path).read())",
            "os.symlink(path, 'link'); print(open('link').read())",
            "os.link(path, 'link'); print(open('link').read())",
            "os.rename(path, 'moved'); print(open('moved').read())",
            "fd = os.open(path, os.O_PATH); print(open(f'/proc/self/fd/{fd}').read())",
            "fd = os.open(os.path.dirname(path), os.O_PATH); print(os.open('program', 0, dir_fd=fd))",
            "os.chdir(os.path.dirname(path)); print(open('program').read())",
            "import subprocess; print(subprocess.check_output([path]))",
            "import subprocess; print(subprocess.check_output(['cat', path]))",
            "os.truncate(path, 0)",
            "os.open(path, os.O_RDONLY | os.O_TRUNC)",
            "os.unlink(path)",
            "open(os.path.dirname(path) + '/new', 'w')",
            "os.mkfifo(os.path.dirname(path) + '/new')",
            "os.rename(os.path.dirname(path), os.path.dirname(path) + '2')",
            "import mmap; print(mmap.mmap(os.open(path, os.O_RDWR), 10)[:])",
            "import shutil; shutil.copytree(os.path.dirname(path), 'copy'); print(open('copy/program').read())",
        ],
    )
    def test_no_path_reaches_a_file_outside(self, code: str, host_file: str) -> None:
        text = only(f"import os; path = {host_file!r}; {code}")
        assert "Error" in text.splitlines()[-1]
        assert SECRET not in text


class TestReachingOut:
    def test_tcp_to_a_listener_on_this_machine_fails(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            code = f"import socket; socket.create_connection({listener.getsockname()})"
            assert "Network is unreachable" in only(code)

    def test_udp_fails(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
            receiver.bind(("127.0.0.1", 0))
            receiver.setblocking(False)
            address = receiver.getsockname()
            code = f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {address})"
            assert "Network is unreachable" in only(code)
            with pytest.raises(BlockingIOError):
                receiver.recv(1)

    @pytest.mark.parametrize("family", ["AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"])
    def test_sockets_of_other_families_fail(self, family: str) -> None:
        code = f"import socket; socket.socket(socket.{family}, socket.SOCK_RAW)"
        assert "Network is unreachable" in only(code)

    def test_unix_sockets_of_the_host_cannot_be_reached(self, tmp_path: Path) -> None:
        name = uuid4().hex
        with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as abstract:
            by_path.bind(str(tmp_path / "s"))
            abstract.bind(f"\0{name}")
            by_path.listen()
            abstract.listen()
            for address in (str(tmp_path / "s"), f"\0{name}"):
                text = only(f"import socket; socket.socket(socket.AF_UNIX).connect({address!r})")
                assert is_refused(text, "ConnectionRefusedError", "OSError: [Errno 101]")

    def test_datagrams_of_a_socket_pair_cannot_leave_the_sandbox(self, tmp_path: Path) -> None:
        os.chmod(tmp_path, 0o777)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
            receiver.bind(str(tmp_path / "s"))
            receiver.setblocking(False)
            pair = "import socket; one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
            only(f"{pair}; one.sendto(b'x', {str(tmp_path / 's')!r})")
            with pytest.raises(BlockingIOError):
                receiver.recv(1)

    @pytest.mark.parametrize("folder", ["/", "/usr", "/etc", "/dev", "/proc/sys/kernel", "/tmp/../var"])
    def test_nothing_outside_its_own_folder_can_be_written(self, folder: str) -> None:
        assert is_refused(only(f"open({folder!r} + '/core_pattern', 'w')"), "OSError: [Errno 30]")

    def test_the_agent_cannot_be_signalled(self) -> None:
        assert is_refused(only(f"import os; os.kill({max(os.getpid(), 100)}, 0)"))

    def test_killing_all_visible_processes_kills_only_the_codes_own(self) -> None:
        assert "killed by signal SIGKILL" in lost(SUICIDE)

    def test_the_supervisor_cannot_be_killed(self) -> None:
        code = (
            "import os\n"
            "for number in (1, 2, 9, 15, 19):\n"
            "    try: os.kill(os.getppid(), number)\n"
            "    except PermissionError: pass"
        )
        assert only(code) == "(no output)"

    @pytest.mark.parametrize(
        "call",
        [
            "ptrace(16, 1, 0, 0)",
            "mount(b'none', b'/', None, 32 | 4096, None)",
            "umount2(b'/proc', 2)",
            "chroot(b'.')",
            "pivot_root(b'.', b'.')",
            "unshare(0x10000000)",
            "setns(0, 0)",
            "setuid(0)",
            "syscall(435, 0, 0)",
            "setpriority(0, PARENT, 19)",
            "setpriority(2, 0, 19)",
            "sched_setaffinity(PARENT, 8, b'\\1' + bytes(7))",
            "sched_setscheduler(PARENT, 5, bytes(4))",
            "mq_open(b'/queue', 66, 0o600, None)",
            "syscall(425, 1, 0)",
            "sethostname(b'x', 1)",
            "prlimit(1, 7, ctypes.byref((ctypes.c_ulong * 2)(0, 0)), None)",
        ],
    )
    def test_system_calls_that_could_open_the_sandbox_are_refused(self, call: str) -> None:
        assert only(f"import ctypes, os; PARENT = os.getppid(); ctypes.CDLL(None).{call}") == "-1"

    def test_a_set_uid_program_grants_no_privileges(self) -> None:
        code = "import subprocess; print(subprocess.run(['su', '-c', 'id'], capture_output=True, text=True))"
        assert "uid=0" not in only(code)


class TestLeavingSomethingBehind:
    @pytest.mark.parametrize(
        "start",
        [
            "subprocess.Popen(command)",
            "subprocess.Popen(command, start_new_session=True)",
            "subprocess.Popen(['nohup', *command])",
            "daemonize()",
        ],
    )
    def test_daemons_end_with_their_trajectory(self, start: str) -> None:
        marker = f"{random.randint(10**8, 10**9)}.{random.randint(10**8, 10**9)}"
        code = (
            "import os, subprocess, time\n"
            f"command = ['sh', '-c', 'echo >started; exec sleep {marker}']\n"
            "def daemonize():\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        if os.fork() == 0: os.execvp('sh', command)\n"
            "        os._exit(0)\n"
            f"{start}\n"
            "while not os.path.exists('started'): time.sleep(0.01)\n"
            "print('running')"
        )
        assert "running" in only(code)
        assert running(marker) == []

    def test_an_interpreter_that_exits_between_calls_is_reported(self) -> None:
        started, after, last = talk(
            "import os, threading\nthreading.Timer(0.05, os._exit, [7]).start()",
            "import time; time.sleep(5)",
            "1",
        )
        assert not started.is_error
        assert "exited with status 7" in after.text
        assert last.text == "1"


class TestFightingTheInterpreter:
    @pytest.mark.parametrize(
        ("code", "says"),
        [
            ("import os; os._exit(3)", "exited with status 3"),
            ("import os; os.abort()", "killed by signal SIGABRT"),
            ("import ctypes; ctypes.string_at(0)", "killed by signal SIGSEGV"),
            ("import os; os.write(4, b'd' * 100)", "broke the interpreter's own pipes"),
            ("import os; os.close(4)", "variables and imports are lost"),
            ("import os; os.closerange(0, 64)", "variables and imports are lost"),
        ],
    )
    def test_a_broken_interpreter_is_replaced(self, code: str, says: str) -> None:
        assert says in lost(code)

    def test_a_forked_interpreter_reports_no_result(self) -> None:
        code = "import os\ncopy = os.fork()\nprint('hello')\nif copy: os.waitpid(copy, 0)"
        both, after = talk(code, "1 + 1")
        assert both.text == "hello\nhello"
        assert after.text == "2"

    @pytest.mark.parametrize(
        ("code", "says"),
        [
            ("exit()", "SystemExit"),
            ("import sys; sys.exit('bye')", "SystemExit"),
            ("class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad", "Bad"),
            ("import sys\nsys.stdout.close(); sys.stdin.close(); sys.stderr.close()", ""),
            ("import os\nos.close(0); os.close(1); os.close(2)", ""),
            ("import sys\nsys.stdout = None; del sys.stderr", ""),
        ],
    )
    def test_an_odd_end_of_a_call_does_not_end_the_interpreter(self, code: str, says: str) -> None:
        assert says in only(code)

    def test_a_forged_verdict_does_not_count_for_a_later_call(self) -> None:
        later = (
            "import os, threading, time\n"
            "def forge():\n"
            "    time.sleep(0.05)\n"
            "    os.write(4, b'n' * 16 + b'd')\n"
            "threading.Thread(target=forge).start()\n"
        )
        _, after, last = talk(later, "import time; time.sleep(0.5); print('true answer')", "1 + 1")
        assert after.is_error
        assert "broke the interpreter's own pipes" in after.text
        assert last.text == "2"

    @pytest.mark.parametrize(
        ("interval_s", "codes"),
        [
            ("0.01", ["import time; time.sleep(0.02)", "kept"]),
            ("0.0001, 0.0001", ["import signal; signal.setitimer(0, 0)", "import os; os._exit(0)", "1 + 1"]),
        ],
        ids=["one", "a flood"],
    )
    def test_signals_from_an_earlier_call_affect_only_the_interpreter(
        self, interval_s: str, codes: list[str]
    ) -> None:
        code = (
            "import signal\nkept = 2\n"
            "def complain(*_): raise TimeoutError('late')\n"
            f"signal.signal(signal.SIGALRM, complain); signal.setitimer(signal.ITIMER_REAL, {interval_s})"
        )
        *_, last = talk(code, *codes)
        assert last.text.endswith("2")

    async def test_other_sandboxes_are_not_affected(self) -> None:
        tool = python_tool()
        for name in ("victim", "neighbour"):
            await tool.create(name)
        async with asyncio.TaskGroup() as group:
            computing = group.create_task(ask(tool, "neighbour", "import time; time.sleep(0.5); 6 * 7"))
            ended = group.create_task(ask(tool, "victim", SUICIDE))
        for name in ("victim", "neighbour"):
            await tool.release(name)
        assert "SIGKILL" in ended.result().text
        assert computing.result().text == "42"
