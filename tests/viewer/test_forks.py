"""Forks of trajectories with an edited turn: who may start them, and what they return."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from starlette.testclient import TestClient

from agent_loop.errors import ConfigError, DataError
from agent_loop.storage import StoredRun, write_vocabulary
from agent_loop.viewer.app import create_viewer_app
from agent_loop.viewer.fork_process import run_fork
from agent_loop.viewer.forks import MAX_BODY_BYTES, ForkJob, Forks
from agent_loop.viewer.source import RunSource
from tests.cli.project import AGENT_LOOP, make_stored_project
from tests.helpers import small_tokenizer
from tests.viewer.browser import Viewer, shoot, viewing

GIVEN = {"split": "train", "step": 1, "id": "group=0/rollout=0", "turn": 1, "text": "x"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 10, "b": 7}}\n</tool_call>'


@pytest.fixture
def forks(run_folder: Path) -> Forks:
    return Forks(RunSource(run_folder), server="run", host="127.0.0.1")


@pytest.fixture
def client(run_folder: Path, forks: Forks) -> TestClient:
    app = create_viewer_app(RunSource(run_folder), hosts=("127.0.0.1",), forks=forks)
    return TestClient(app, base_url="http://127.0.0.1:7321")


@pytest.fixture(scope="module")
def stored_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with a run of a scripted model, which calls a tool and answers."""
    folder = tmp_path_factory.mktemp("forks")
    make_stored_project(folder)
    command = [*AGENT_LOOP, "rollout", "config.yaml", "--out", "run/rollout.parquet"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # an event loop is running here
    write_vocabulary(folder / "run" / "vocabulary.json", small_tokenizer())
    (folder / "run" / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    return folder


def test_only_the_page_may_start_a_fork_and_a_wrong_request_gets_a_reason(
    client: TestClient, forks: Forks
) -> None:
    token = {"x-viewer-token": forks.token}
    for headers, status in (
        ({}, 403),
        ({"x-viewer-token": "guess"}, 403),
        (token | {"origin": "http://evil.example"}, 403),
        (token | {"host": "evil.example"}, 421),
        (token | {"content-type": "text/plain"}, 415),
    ):
        reply = client.post("/api/fork", json=GIVEN, headers=headers)
        assert (reply.status_code, bool(reply.json()["error"])) == (status, True)
    assert client.get("/api/fork").status_code == 405
    for change, status, message in (
        ({"turn": "first"}, 400, "Expected `int`"),
        ({"id": "group=9/rollout=9"}, 404, "no trajectory group=9/rollout=9"),
        ({"text": "x" * MAX_BODY_BYTES}, 413, "too long"),
    ):
        headers = token | {"origin": "http://127.0.0.1:7321"}
        reply = client.post("/api/fork", json=GIVEN | change, headers=headers)
        assert (reply.status_code, message in reply.json()["error"]) == (status, True)


def test_a_viewer_without_a_server_says_how_to_give_one(run_folder: Path) -> None:
    client = TestClient(create_viewer_app(RunSource(run_folder), hosts=None))
    state = client.get("/api/what-if").json()
    assert state["token"] is None
    assert "--server URL" in state["problem"]
    assert client.post("/api/fork", json=GIVEN).status_code == 503


def test_a_server_that_cannot_be_used_and_a_run_without_settings_are_refused(
    run_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="give the URL of a server"):
        Forks(RunSource(run_folder), server="localhost:8000", host="127.0.0.1")
    with pytest.raises(ConfigError, match="lets others open it"):
        Forks(RunSource(run_folder), server="http://localhost:8000", host="0.0.0.0")
    path = tmp_path / "alone.parquet"
    path.write_bytes(next(run_folder.rglob("*.parquet")).read_bytes())
    with pytest.raises(DataError, match="needs the settings of the run"):
        Forks(RunSource(path), server="run", host="127.0.0.1")


@pytest.mark.slow
def test_a_fork_has_the_turns_before_and_continues_after_the_text(
    stored_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stored_project)
    out = tmp_path / "fork.parquet"
    place = {"split": "rollout", "step": 0, "id": "group=2/rollout=0", "turn": 1, "text": CALL}
    files = {"file": "run/rollout.parquet", "config": "run/config.yaml", "out": str(out)}
    job = ForkJob(**place, **files, server_url=None)
    run_fork(job)
    (row,) = StoredRun(out).rows()
    assert (row["num_assistant_turns"], row["failure"], row["answer"]) == (2, None, "sum 3")
    assert '"content":"17"' in row["messages"]
    old = StoredRun("run").trajectory("rollout", 0, "group=2/rollout=0")
    assert row["prompt_ids"].tolist() == old["prompt_ids"].tolist()

    first_turn = slice(0, old["segments"][1]["num_tokens"])
    unedited = small_tokenizer().decode(old["response_ids"][first_turn])
    run_fork(structs.replace(job, text=unedited))
    (same,) = StoredRun(out).rows()
    for column in ("response_ids", "response_logprobs"):
        assert same[column][first_turn].tolist() == old[column][first_turn].tolist()

    with pytest.raises(DataError, match="has 2 turns of the model"):
        run_fork(structs.replace(job, turn=3))


@pytest.mark.browser
@pytest.mark.timeout(400)
def test_a_turn_is_edited_and_original_and_fork_are_shown(
    page: Any, stored_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stored_project)
    with viewing(Path("run"), "--server", "run") as viewer:
        page.goto(f"{viewer.url}#/trajectory?split=rollout&step=0&id=group%3D2%2Frollout%3D0")
        page.get_by_label("What if turn 1 were different?").click()
        text = page.get_by_label("Text of turn 1")
        page.locator(".fork-message", has_text="Edit the text").wait_for()
        assert text.input_value().startswith("<tool_call>")
        text.fill(CALL)
        page.get_by_role("button", name="Run from here").click()
        page.locator(".turn-cell .call-line", has_text="add(a: 10, b: 7)").wait_for(timeout=240_000)
        page.locator(".turn-cell .reply", has_text="17").wait_for()
        assert page.locator(".turn-cell.parting").count() == 2
        shoot(page, "fork")
        page.keyboard.press("Escape")
        page.locator(".trajectory-page").wait_for()


@pytest.mark.browser
def test_the_page_says_that_there_is_no_server(page: Any, small_viewer: Viewer) -> None:
    page.goto(f"{small_viewer.url}#/fork?split=train&step=6&id=group%3D0%2Frollout%3D2&turn=2")
    page.locator(".fork-message", has_text="--server URL").wait_for()
    assert page.get_by_role("button", name="Run from here").is_disabled()
