"""The commands in a terminal of 60 columns without colour, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from tests.cli.project import AGENT_LOOP, make_project

COLUMNS = 60
COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3|4|9|10)[0-7]m|\x1b\[38;")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?=[^\n])")
TABLE = frozenset("│┃┏┓┡┩└┘├┤━─")
COMMANDS = {
    "rollout config.yaml -n 1 --out sampled.parquet": (
        "ended with",
        "trajectories",
        "response_length",
        "agent-loop view",
    ),
    "eval config.yaml -n 2 --out evaluated": ("pass@1", "mean reward", "question 0", "agent-loop view"),
    "train config.yaml trainer.total_steps=1 trainer.run_dir=run": (
        "the run is in run",
        "agent-loop export",
    ),
    "plan config.yaml --devices 1x24GB": ("part", "device", "trainer"),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    make_project(folder)
    return folder


def in_terminal(line: str, *, cwd: Path) -> tuple[int, str]:
    """Run a command in a pseudo-terminal, and return its exit code and what the terminal received."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"NO_COLOR": "1", "TERM": "xterm-256color"}
    running = subprocess.Popen(
        [str(AGENT_LOOP), *line.split()], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    received = b""
    try:
        while part := os.read(ours, 1 << 16):
            received += part
    except OSError:  # Linux reports the end of the other side so
        pass
    os.close(ours)
    return running.wait(), received.decode("utf-8", "replace")


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", COMMANDS)
def test_sixty_columns_without_colour_are_enough(project: Path, line: str) -> None:
    code, received = in_terminal(line, cwd=project)
    assert code == 0, received
    assert not COLOUR.search(received)
    shown = CONTROL.sub("\n", STYLE.sub("", received).replace("\r\n", "\n"))
    drawn = [each for each in shown.splitlines() if TABLE & {*each}]
    assert [each for each in drawn if len(each) > COLUMNS or "…" in each] == []
    flat = " ".join(shown.split())
    assert [text for text in COMMANDS[line] if text not in flat] == [], shown


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipe_gets_plain_lines(project: Path) -> None:
    for line in (
        "rollout config.yaml -n 1 --out piped.parquet",
        "train config.yaml trainer.run_dir=piped -q",
    ):
        done = subprocess.run(
            [str(AGENT_LOOP), *line.split()], cwd=project, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "Loading weights" not in done.stderr
    assert done.stdout == "the run is in piped\n"
