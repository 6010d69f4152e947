from __future__ import annotations

import signal
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from agent_loop.cli import main
from agent_loop.errors import ConfigError
from agent_loop.viewer import command
from tests.viewer.browser import viewing


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `agent-loop view` and return its exit code."""
    monkeypatch.setattr("sys.argv", ["agent-loop", "view", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_a_missing_run_is_reported_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, str(tmp_path / "none"), "--no-open") == 2
    assert "none' does not exist; give the folder of a run" in capsys.readouterr().err


def test_a_taken_port_is_an_error_if_it_was_requested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_main(monkeypatch, str(run_folder), "--no-open", "--port", str(port)) == 2
    assert f"127.0.0.1:{port} is not available" in capsys.readouterr().err


def test_the_next_free_port_is_used_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def listening_socket(host: str, port: int) -> socket.socket:
        asked.append(port)
        if len(asked) < 3:
            raise ConfigError("taken")
        return socket.create_server((host, 0))

    monkeypatch.setattr(command, "listening_socket", listening_socket)
    with command.free_listener("127.0.0.1", None):
        assert asked == [command.FIRST_PORT, command.FIRST_PORT + 1, command.FIRST_PORT + 2]


def test_the_export_needs_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "x.html"
    assert run_main(monkeypatch, str(run_folder), "--export", str(target), "--max-trajectories", "3") == 0
    assert "102 trajectories, 3 in full" in capsys.readouterr().out
    assert target.stat().st_size > 10_000


@pytest.mark.slow
def test_ctrl_c_stops_the_viewer(run_folder: Path) -> None:
    with viewing(run_folder) as viewer:
        assert urlopen(viewer.url).status == 200
        assert viewer.stop() == 128 + signal.SIGINT
