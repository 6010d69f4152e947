"""`agent-loop traces`: print a trace file, or send it to a tracing system."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from agent_loop.config import TraceConfig
from agent_loop.errors import DataError
from agent_loop.files.file_kinds import TRACES, explain, kind_of
from agent_loop.tracing.trace_files import event_lines, read_traces


def traces_command(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Trace file, as in `rollout.trace.path`.")],
    *,
    trajectory: Annotated[
        str | None,
        typer.Option("--trajectory", help="Only trajectories whose id contains this, as in `step=3/`."),
    ] = None,
    to: Annotated[
        Literal["mlflow", "otel", "weave"] | None,
        typer.Option("--to", help="Send the traces to this system instead of printing them."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", help="Address of the system, as in `rollout.trace.tracking_uri` or `otlp_endpoint`."
        ),
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Project, as in `rollout.trace.project_name`.")
    ] = None,
) -> None:
    """Print the traces of `rollout.trace.backend=file`, one line of JSON per event, or send them to a tracing system.

    Examples:

        agent-loop traces runs/train/traces.jsonl --trajectory step=12/group=3/

        agent-loop traces runs/train/traces.jsonl | jq -c 'select(.event == "tool" and .incident != null)'

        agent-loop traces runs/train/traces.jsonl --to mlflow --at http://127.0.0.1:5000 --project maths
    """
    is_empty = path.is_file() and not path.stat().st_size
    if kind_of(path) is not TRACES and not is_empty:
        raise DataError(explain(path, wanted="a trace file, as in rollout.trace.path"))
    documents = (
        document
        for document in read_traces(path)
        if trajectory is None or trajectory in document["attributes"]["trajectory_id"]
    )
    if to is None:
        for document in documents:
            sys.stdout.buffer.writelines(event_lines(document))
        return
    from agent_loop.tracing.tracer import make_writer, send_traces  # late: keeps `--help` quick

    config = TraceConfig(backend=to, tracking_uri=at, otlp_endpoint=at, project_name=project)
    count = send_traces(documents, writer=make_writer(to, config))
    typer.echo(f"{count} trajectories are in {to}")
