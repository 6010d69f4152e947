from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from agent_loop.viewer.app import HANDLERS, create_viewer_app
from agent_loop.viewer.pages import static_files
from agent_loop.viewer.source import RunSource
from tests.harness import thinned


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


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2f..%2fapp.py", "/static/none.js", "/app.py"],
)
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_other_hosts_and_other_methods_are_rejected(client: TestClient) -> None:
    assert client.get("/api/state", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/api/state", headers={"host": "[::1]:7321"}).status_code == 200
    assert client.post("/api/state").status_code == 405


def test_all_hosts_are_allowed_if_configured(run_folder: Path) -> None:
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


HOSTILE = [
    "",
    "-1",
    "9" * 20,
    "9" * 5000,
    "1e5",
    "NaN",
    "\u0663",
    "\u00b2",
    "1,2,,3",
    ",".join(["1"] * 20_000),
    "%00",
    "%ff",
    "%ed%a0%80",
    "../../etc/passwd",
    "x" * 50_000,
    "'\"<script>",
]


@pytest.mark.parametrize("name", [*HANDLERS, "none"])
def test_any_query_gets_a_response_or_a_client_error(run_folder: Path, name: str) -> None:
    app = create_viewer_app(RunSource(run_folder), hosts=None)
    client = TestClient(app, raise_server_exceptions=False)
    usual = {"files": "0", "text": "a", "split": "train", "step": "1", "id": "x", "cursor": ""}
    for field in usual:
        for value in thinned(HOSTILE, step=4):
            query = "&".join(f"{key}={given}" for key, given in {**usual, field: value}.items())
            reply = client.get(f"/api/{name}?{query}")
            assert reply.status_code in (200, 400, 404), (field, value[:80], reply.text[:200])
            if reply.status_code != 200:
                assert reply.json()["error"]
                assert len(reply.text) < 500
