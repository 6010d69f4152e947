"""Spans as an OpenTelemetry collector receives them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.config import TraceConfig
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


def test_a_trajectory_is_one_trace_of_nested_spans(collector: Collector) -> None:
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


def test_attributes_are_those_of_the_conventions_for_generative_ai(collector: Collector) -> None:
    [trajectory] = run(traces_to(collector))
    root, *others = collector.spans
    attributes = attributes_of(root)
    assert attributes["gen_ai.operation.name"] == "invoke_agent"
    assert attributes["gen_ai.agent.name"] == "tool_agent"
    assert attributes["gen_ai.conversation.id"] == "step=3/group=0/rollout=0"
    assert attributes["agent_loop.step"] == 3
    assert attributes["agent_loop.stop_reason"] == "answered"
    chats = [attributes_of(span) for span in others if span.name == "chat"]
    assert [chat["gen_ai.operation.name"] for chat in chats] == ["chat", "chat"]
    assert chats[0]["gen_ai.usage.input_tokens"] == len(trajectory.output.prompt_ids)
    assert sum(chat["gen_ai.usage.output_tokens"] for chat in chats) == int(
        trajectory.output.response_mask.sum()
    )
    [tool] = [attributes_of(span) for span in others if span.name.startswith("execute_tool")]
    assert tool["gen_ai.tool.name"] == "add"
    assert not [
        name for each in [attributes, tool, *chats] for name in each if "messages" in name or "call" in name
    ]


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
