"""Calls of Weave's own client for a trajectory, without Weave's service."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.config import TraceConfig
from tests.tracing.harness import run

weave = pytest.importorskip("weave")
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


class Service:
    """Fake `TraceServerClientInterface` that stores the client's requests."""

    def __init__(self) -> None:
        self.starts: list[Any] = []
        self.ends: list[Any] = []

    def call_start(self, request: Any) -> Any:
        start = request["start"]
        self.starts.append(SimpleNamespace(**start))
        return SimpleNamespace(id=start["id"], trace_id=start["trace_id"])

    def call_end(self, request: Any) -> Any:
        self.ends.append(SimpleNamespace(**request["end"]))
        return SimpleNamespace()

    def obj_create(self, request: Any) -> Any:
        return SimpleNamespace(digest=f"{hash(str(request)):x}")

    def file_create(self, request: Any) -> Any:
        return SimpleNamespace(digest=f"{hash(str(request)):x}")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    from weave.trace.context.weave_client_context import set_weave_client_global
    from weave.trace.weave_client import WeaveClient

    service = Service()

    def init(project: str) -> Any:
        client = WeaveClient("somebody", project, service, ensure_project_exists=False)
        set_weave_client_global(client)
        return client

    monkeypatch.setattr(weave, "init", init)
    return service


def test_a_trajectory_is_a_call_with_nested_calls(service: Service) -> None:
    [trajectory] = run(TraceConfig(backend="weave", project_name="tea", token2text=True, flush_timeout_s=60))
    [root] = [start for start in service.starts if start.parent_id is None]
    by_name = {start.op_name.split("/")[-1].split(":")[0]: start for start in service.starts}
    assert root.parent_id is None
    assert by_name["add"].parent_id == root.id
    assert by_name["Adder.sum_of"].parent_id == by_name["add"].id
    assert by_name["add"].inputs["arguments"] == {"a": 1, "b": 2}
    assert root.attributes["step"] == 3
    assert {start.trace_id for start in service.starts} == {root.trace_id}
    [end] = [end for end in service.ends if end.id == root.id]
    assert end.output["stop_reason"] == "answered"
    assert trajectory.trace is not None
    assert (end.ended_at - root.started_at).total_seconds() == pytest.approx(
        trajectory.trace.seconds, abs=1e-3
    )
    assert len(service.ends) == len(service.starts)
