"""Spans as an OpenTelemetry collector, MLflow's store and Weave's client receive them."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import TraceConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.scripted import ScriptedReply
from tests.helpers import encoded
from tests.tracing.harness import run

NAMES = ["invoke_agent tool_agent", "chat", "execute_tool add", "Adder.sum_of", "chat"]


class Collector:
    """Small OTLP collector at `url`."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = ""

    @property
    def spans(self) -> list[Span]:
        return [
            s for r in self.requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans
        ]

    def resource(self) -> dict[str, Any]:
        return attributes_of(self.requests[0].resource_spans[0].resource)


def attributes_of(span: Any) -> dict[str, Any]:
    def value_of(value: AnyValue) -> Any:
        return getattr(value, str(value.WhichOneof("value")))

    return {attribute.key: value_of(attribute.value) for attribute in span.attributes}


@contextmanager
def listening(collector: Collector) -> Generator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def collector() -> Generator[Collector]:
    collector = Collector()
    with listening(collector):
        yield collector


def traces_to(collector: Collector, **trace: Any) -> TraceConfig:
    return TraceConfig(backend="otel", otlp_endpoint=collector.url, project_name="tea", **trace)


def test_a_trajectory_is_one_trace_of_nested_spans_with_conventional_attributes(collector: Collector) -> None:
    [trajectory] = run(traces_to(collector))
    spans = collector.spans
    assert [span.name for span in spans if span.name in NAMES] == NAMES
    assert len({span.trace_id for span in spans}) == 1
    by_name = {span.name: span for span in spans}
    root, tool, inner = by_name[NAMES[0]], by_name["execute_tool add"], by_name["Adder.sum_of"]
    assert not root.parent_span_id
    assert tool.parent_span_id == root.span_id
    assert inner.parent_span_id == tool.span_id
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in spans)
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in spans)
    assert trajectory.trace is not None
    assert abs(root.start_time_unix_nano / 1e9 - trajectory.trace.began_at) < 1e-3
    assert collector.resource()["service.name"] == "tea"

    attributes = attributes_of(root)
    expected = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "tool_agent",
        "gen_ai.conversation.id": "step=3/group=0/rollout=0",
        "agent_loop.step": 3,
        "agent_loop.stop_reason": "answered",
    }
    assert {name: attributes[name] for name in expected} == expected
    chats = [attributes_of(span) for span in spans if span.name == "chat"]
    assert [chat["gen_ai.operation.name"] for chat in chats] == ["chat", "chat"]
    assert chats[0]["gen_ai.usage.input_tokens"] == len(trajectory.output.prompt_ids)
    num_sampled = int(trajectory.output.response_mask.sum())
    assert sum(chat["gen_ai.usage.output_tokens"] for chat in chats) == num_sampled
    assert attributes_of(tool)["gen_ai.tool.name"] == "add"
    every_name = [name for span in spans for name in attributes_of(span) if span is not inner]
    assert not [name for name in every_name if "messages" in name or "call" in name]


def test_texts_are_sent_with_token2text(collector: Collector) -> None:
    run(traces_to(collector, token2text=True))
    spans = {span.name: attributes_of(span) for span in collector.spans}
    assert "What is 1 + 2?" in spans[NAMES[0]]["gen_ai.input.messages"]
    assert "three" in spans["chat"]["gen_ai.output.messages"]
    assert spans["execute_tool add"]["gen_ai.tool.call.arguments"] == '{"a": 1, "b": 2}'
    assert spans["execute_tool add"]["gen_ai.tool.call.result"] == "3"


def test_a_failure_is_an_error_of_the_trace(collector: Collector) -> None:
    run(traces_to(collector), script=[ScriptedReply(encoded("no"), error="on fire")], max_failed_share=1.0)
    root = collector.spans[0]
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert attributes_of(root)["error.type"] == "ServerError"


def test_a_missing_collector_loses_only_traces(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    with listening(collector):
        pass
    trajectories = run(traces_to(collector, flush_timeout_s=0.5), runs=[{"n": 4}])
    assert len(trajectories) == 4
    assert "traces to otel: 4 in total were not written" in caplog.text


def test_a_trace_file_can_be_sent_later(collector: Collector, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    run(TraceConfig(backend="file", path=str(path), token2text=True), runs=[{"n": 3}])
    command = ["traces", str(path), "--to", "otel", "--at", collector.url, "--project", "tea"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.output == "3 trajectories are in otel\n"
    assert len(collector.requests) == 1
    assert collector.resource()["service.name"] == "tea"
    assert sum(span.name == NAMES[0] for span in collector.spans) == 3
    assert "What is 1 + 2?" in attributes_of(collector.spans[0])["gen_ai.input.messages"]


def test_a_missing_package_is_reported_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "weave", None)
    with pytest.raises(ConfigError, match=r'backend=weave needs weave: pip install "agent-loop\[weave\]"'):
        run(TraceConfig(backend="weave"))


@pytest.fixture(scope="module")
def mlflow() -> Any:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    return pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def empty_store(mlflow: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty store, shared by the tests because creating one takes seconds."""
    path = tmp_path_factory.mktemp("store") / "empty.db"
    mlflow.MlflowClient(f"sqlite:///{path}").create_experiment("other")
    return path


class Store:
    def __init__(self, mlflow: Any, uri: str) -> None:
        self._client, self._uri = mlflow.MlflowClient(uri), uri

    def traces(self, **search: Any) -> list[Any]:
        experiment = self._client.get_experiment_by_name("tea")
        found = self._client.search_traces(locations=[experiment.experiment_id], **search)
        return [self._client.get_trace(trace.info.trace_id) for trace in found]

    def config(self, **trace: Any) -> TraceConfig:
        values = {"project_name": "tea", "experiment_name": "green", "flush_timeout_s": 60, **trace}
        return TraceConfig(backend="mlflow", tracking_uri=self._uri, **values)


@pytest.fixture
def store(mlflow: Any, empty_store: Path, tmp_path: Path) -> Store:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return Store(mlflow, f"sqlite:///{tmp_path}/mlflow.db")


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_a_trajectory_is_one_trace_of_nested_spans_with_texts_and_times(store: Store) -> None:
    [trajectory] = run(store.config(token2text=True))
    [trace] = store.traces()
    spans = [span for span in trace.data.spans if span.span_type != "UNKNOWN" or "sum" in span.name]
    assert [(span.name, span.span_type) for span in spans] == [
        ("agent_loop", "AGENT"),
        ("generate", "LLM"),
        ("add", "TOOL"),
        ("Adder.sum_of", "UNKNOWN"),
        ("generate", "LLM"),
    ]
    root, first, tool, inner, last = spans
    assert {first.parent_id, tool.parent_id, last.parent_id} == {root.span_id}
    assert inner.parent_id == tool.span_id
    assert "What is 1 + 2?" in first.inputs["text"]
    assert tool.inputs == {"arguments": {"a": 1, "b": 2}}
    assert tool.outputs == {"text": "3"}
    assert inner.inputs == {"a": 1, "b": 2}
    assert "tool_response" in last.inputs["text"]
    assert last.outputs == {"text": "three<|im_end|>"}
    assert root.start_time_ns <= first.end_time_ns <= tool.start_time_ns
    assert tool.start_time_ns < tool.end_time_ns <= last.start_time_ns
    assert trajectory.trace is not None
    assert abs(root.start_time_ns / 1e9 - trajectory.trace.began_at) < 1e-3
    assert abs((root.end_time_ns - root.start_time_ns) / 1e9 - trajectory.trace.seconds) < 1e-3
    assert (tool.end_time_ns - tool.start_time_ns) / 1e9 >= 0.002


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_traces_are_found_by_the_attributes_that_verl_gives_them(store: Store) -> None:
    run(store.config(), runs=[{"label": "step=1", "n": 2}, {"label": "val/step=1", "validate": True}])
    assert len(store.traces()) == 3
    found = store.traces(filter_string="tag.step = '1' AND tag.validate = 'False'")
    assert sorted(trace.info.tags["rollout_n"] for trace in found) == ["0", "1"]
    assert {trace.info.tags["experiment_name"] for trace in found} == {"green"}
    assert {trace.info.tags["sample_index"] for trace in found} == {"0"}


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_token_ids_and_usage_are_kept_without_texts(store: Store) -> None:
    [trajectory] = run(store.config())
    [trace] = store.traces()
    generated = [span for span in trace.data.spans if span.span_type == "LLM"]
    ids = [id_ for span in generated for id_ in span.outputs["token_ids"]]
    mask = trajectory.output.response_mask.astype(bool)
    assert ids == trajectory.output.response_ids[mask].tolist()
    assert trace.info.token_usage["output_tokens"] == int(mask.sum())


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

    file_create = obj_create


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    weave = pytest.importorskip("weave")
    from weave.trace.context.weave_client_context import set_weave_client_global
    from weave.trace.weave_client import WeaveClient

    service = Service()

    def init(project: str) -> Any:
        client = WeaveClient("somebody", project, service, ensure_project_exists=False)
        set_weave_client_global(client)
        return client

    monkeypatch.setattr(weave, "init", init)
    return service


@pytest.mark.integrations
@pytest.mark.filterwarnings("default")
def test_a_trajectory_is_a_call_with_nested_calls(service: Service) -> None:
    trace = TraceConfig(backend="weave", project_name="tea", token2text=True, flush_timeout_s=60)
    [trajectory] = run(trace)
    [root] = [start for start in service.starts if start.parent_id is None]
    by_name = {start.op_name.split("/")[-1].split(":")[0]: start for start in service.starts}
    assert by_name["add"].parent_id == root.id
    assert by_name["Adder.sum_of"].parent_id == by_name["add"].id
    assert by_name["add"].inputs["arguments"] == {"a": 1, "b": 2}
    assert root.attributes["step"] == 3
    assert {start.trace_id for start in service.starts} == {root.trace_id}
    [end] = [end for end in service.ends if end.id == root.id]
    assert end.output["stop_reason"] == "answered"
    assert trajectory.trace is not None
    seconds = (end.ended_at - root.started_at).total_seconds()
    assert seconds == pytest.approx(trajectory.trace.seconds, abs=1e-3)
    assert len(service.ends) == len(service.starts)
