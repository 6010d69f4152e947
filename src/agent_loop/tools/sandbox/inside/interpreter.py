"""Process that runs the model's code and keeps state between calls.

It consumes calls from one pipe (a nonce, a length, the code) and produces verdicts on another (the nonce and one
byte). Output goes to its standard output. The process is untrusted, since the code may change anything in it.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import io
import linecache
import os
import random
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from agent_loop.tools.sandbox.inside import landlock
from agent_loop.tools.sandbox.inside.seccomp import install_filter
from agent_loop.tools.sandbox.inside.spec import MEGABYTE, SandboxSpec

NONCE_BYTES = 16
LENGTH_BYTES = 4
DONE, FAILED, INTERRUPTED = b"d", b"f", b"i"
REQUESTS_FD, RESULTS_FD, OUTPUT_FD = 3, 4, 5
FIRST_FREE_FD = 64
SHARED_USER_ALLOWANCE = 2048
"""Allowed processes and threads in addition to those of the machine, where sandboxes share the agent's user. This is
the limit until the supervisor counts the processes."""
CATCHABLE_SIGNALS = tuple(
    number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP)
)
Handler: TypeAlias = Callable[[int, types.FrameType | None], Any]


def become_interpreter(
    spec: SandboxSpec, *, work: str, ruleset: int | None, requests: int, results: int, output: int
) -> NoReturn:
    """Turn this process into an interpreter. This function never returns."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    process_limit = spec.max_processes
    if not spec.has_own_user:
        with open("/proc/loadavg") as file:  # the number of threads on the whole machine
            process_limit = int(file.read().split()[3].partition("/")[2]) + SHARED_USER_ALLOWANCE
    if ruleset is not None:
        landlock.enforce(ruleset)
    _arrange_descriptors(requests, results, output)
    os.chdir(f"{work}/home")
    os.environ |= {"HOME": f"{work}/home", "TMPDIR": f"{work}/tmp"}
    _seed(spec.seed)
    _apply_limits(spec, process_limit=process_limit)
    try:
        install_filter(shares_user=not spec.has_own_user)
    except OSError:
        if spec.landlock_version:
            raise
    Interpreter().serve()


class Interpreter:
    """Interpreter that runs calls in one namespace, like a notebook."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._num_calls = 0
        self._handlers: dict[signal.Signals, Handler] = {}
        self._namespace = _new_main()

    def serve(self) -> NoReturn:
        """Run calls until the supervisor closes the pipe."""
        while True:
            nonce, source = self._read_call()
            self._restore_streams()
            verdict = self._run(source)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(BaseException):  # the code may have replaced the streams
                    stream.flush()
            if os.getpid() != self._pid:
                os._exit(0)  # a process that the code forked; only the original reports the verdict
            os.write(RESULTS_FD, nonce + verdict)

    def _read_call(self) -> tuple[bytes, str]:
        head = NONCE_BYTES + LENGTH_BYTES
        buffer = b""
        while len(buffer) < head or len(buffer) < head + int.from_bytes(buffer[NONCE_BYTES:head], "big"):
            data = os.read(REQUESTS_FD, 2**16)
            if not data:
                os._exit(0)
            buffer += data
        return buffer[:NONCE_BYTES], buffer[head:].decode()

    def _run(self, source: str) -> bytes:
        self._num_calls += 1
        failure: BaseException | None = None
        try:
            self._restore_handlers()
            _run_cell(source, name=f"<call {self._num_calls}>", namespace=self._namespace)
        except BaseException as error:  # noqa: BLE001  (reported to the model)
            failure = error
        finally:
            self._suspend_handlers()
        if failure is None:
            return DONE
        if isinstance(failure, KeyboardInterrupt):
            _print_error("KeyboardInterrupt")
            return INTERRUPTED
        _print_error(_short_traceback(failure))
        return FAILED

    def _restore_handlers(self) -> None:
        """Install the code's own signal handlers from earlier calls, and the interrupt of the time limit."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _suspend_handlers(self) -> None:
        """Ignore signals between calls, since a handler would raise in this class instead of in the model's code."""
        is_quiet = False
        while not is_quiet:
            try:
                for number in CATCHABLE_SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, signal.SIG_IGN)
                is_quiet = True
            except BaseException:  # noqa: BLE001  (a pending handler ran)
                continue

    def _restore_streams(self) -> None:
        """Restore standard output and error, which an earlier call may have closed or replaced."""
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(OUTPUT_FD, number)
            if getattr(getattr(sys, name), "closed", True):
                setattr(sys, name, _open_stream(number))


def _run_cell(source: str, *, name: str, namespace: dict[str, Any]) -> None:
    """Run the code, and print the value of a last expression as at a prompt."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
        sys.displayhook(value)


def _short_traceback(error: BaseException) -> str:
    """Return the traceback with the lines of the model's code only."""
    try:
        report = traceback.TracebackException.from_exception(error)
        part: traceback.TracebackException | None = report
        while part is not None:
            part.stack = traceback.StackSummary.from_list(
                [frame for frame in part.stack if frame.filename.startswith("<call ")]
            )
            part = part.__cause__ or part.__context__
        return "".join(report.format())
    except BaseException as failure:  # noqa: BLE001  (out of memory, or an exception that cannot be formatted)
        return f"{type(error).__name__} ({type(failure).__name__} while formatting the traceback)"


def _print_error(text: str) -> None:
    with contextlib.suppress(BaseException):  # the code may have replaced the stream
        sys.stdout.flush()
    data = memoryview(f"{text.rstrip()}\n".encode(errors="backslashreplace"))
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(OUTPUT_FD, data) :]


def _new_main() -> dict[str, Any]:
    """Return the namespace of an empty `__main__`, and remove this package from the imported modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "agent_loop"]:
        del sys.modules[name]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path.insert(0, "")
    return vars(module)


def _arrange_descriptors(requests: int, results: int, output: int) -> None:
    """Move the file descriptors to their fixed numbers and close all others."""
    null = os.open(os.devnull, os.O_RDONLY)
    targets = {0: null, 1: output, 2: output, REQUESTS_FD: requests, RESULTS_FD: results, OUTPUT_FD: output}
    copies = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE_FD) for target, fd in targets.items()}
    for target, fd in copies.items():
        os.dup2(fd, target, inheritable=target <= 2)
    os.closerange(OUTPUT_FD + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = _open_stream(1), _open_stream(2)


def _open_stream(number: int) -> io.TextIOWrapper:
    return open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _seed(seed: int | None) -> None:
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _apply_limits(spec: SandboxSpec, *, process_limit: int) -> None:
    cpu_seconds = spec.cpu_seconds
    memory_bytes, file_bytes = spec.memory_mb * MEGABYTE, spec.max_file_mb * MEGABYTE
    for limit, soft, hard in (
        (resource.RLIMIT_NPROC, process_limit, process_limit),
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),  # SIGXCPU, then SIGKILL
        (resource.RLIMIT_NOFILE, spec.max_open_files, spec.max_open_files),
        (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
        (resource.RLIMIT_CORE, 1, 1),  # 0 would still write to a core_pattern that is a pipe
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        allowed = resource.getrlimit(limit)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(limit, (soft, hard))
