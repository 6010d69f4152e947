"""Traces as MLflow's own client reads them from its store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_loop.config import TraceConfig
from tests.tracing.harness import run

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty store, shared by the tests because creating one takes seconds."""
    path = tmp_path_factory.mktemp("store") / "empty.db"
    mlflow.MlflowClient(f"sqlite:///{path}").create_experiment("other")
    return path


@pytest.fixture
def uri(empty_store: Path, tmp_path: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def traces_in(uri: str, **search: Any) -> list[Any]:
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("tea")
    if experiment is None:
        return []
    found = client.search_traces(locations=[experiment.experiment_id], **search)
    return [client.get_trace(trace.info.trace_id) for trace in found]


def trace_to(uri: str, **trace: Any) -> TraceConfig:
    values = {"project_name": "tea", "experiment_name": "green", "flush_timeout_s": 60, **trace}
    return TraceConfig(backend="mlflow", tracking_uri=uri, **values)


def test_a_trajectory_is_one_trace_of_nested_spans_with_texts_and_times(uri: str) -> None:
    [trajectory] = run(trace_to(uri, token2text=True))
    [trace] = traces_in(uri)
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
    assert (
        root.start_time_ns <= first.end_time_ns <= tool.start_time_ns < tool.end_time_ns <= last.start_time_ns
    )
    assert trajectory.trace is not None
    assert abs(root.start_time_ns / 1e9 - trajectory.trace.began_at) < 1e-3
    assert abs((root.end_time_ns - root.start_time_ns) / 1e9 - trajectory.trace.seconds) < 1e-3
    assert (tool.end_time_ns - tool.start_time_ns) / 1e9 >= 0.002


def test_traces_are_found_by_the_attributes_that_verl_gives_them(uri: str) -> None:
    run(trace_to(uri), runs=[{"label": "step=1", "n": 2}, {"label": "val/step=1", "validate": True}])
    assert len(traces_in(uri)) == 3
    found = traces_in(uri, filter_string="tag.step = '1' AND tag.validate = 'False'")
    assert sorted(trace.info.tags["rollout_n"] for trace in found) == ["0", "1"]
    assert {trace.info.tags["experiment_name"] for trace in found} == {"green"}
    assert {trace.info.tags["sample_index"] for trace in found} == {"0"}


def test_token_ids_and_usage_are_kept_without_texts(uri: str) -> None:
    [trajectory] = run(trace_to(uri))
    [trace] = traces_in(uri)
    generated = [span for span in trace.data.spans if span.span_type == "LLM"]
    ids = [id_ for span in generated for id_ in span.outputs["token_ids"]]
    mask = trajectory.output.response_mask.astype(bool)
    assert ids == trajectory.output.response_ids[mask].tolist()
    assert trace.info.token_usage["output_tokens"] == int(mask.sum())
