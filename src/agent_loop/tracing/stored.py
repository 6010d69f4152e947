"""Reading of trace files that the `file` backend wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from agent_loop.errors import DataError
from agent_loop.tracing.account import Account
from agent_loop.tracing.background_writer import BatchWriter
from agent_loop.tracing.events import Event
from agent_loop.tracing.json_traces import VERSION, JsonTrace, account_from_json
from agent_loop.tracing.reading import events_of

logger = logging.getLogger(__name__)


def read_traces(path: Path) -> Iterator[tuple[JsonTrace, Account]]:
    """Yield the trajectories of a file in the order in which they ended, each as stored JSON and as an account.

    An incomplete last line, such as after the process was killed, is skipped with a warning.

    Raises:
        DataError: There is no such file, or a line is not a trajectory.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    logger.warning("%s: line %d is incomplete; it is skipped", path, number)
                    return
                yield _parse_trace(line, where=f"{path}, line {number}")
    except OSError as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({error}); give the file that rollout.trace.path named"
        ) from error


def read_accounts(path: Path) -> Iterator[Account]:
    """Yield the accounts of a file; see `read_traces`."""
    return (account for _, account in read_traces(path))


def event_lines(account: Account) -> Iterator[bytes]:
    """Yield a trajectory's events as lines of JSON."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    for event in events_of(account):
        yield orjson.dumps(_event_values(event, account.attributes.trajectory_id), option=options)


def send_traces(json_traces: Iterable[JsonTrace], *, writer: BatchWriter[JsonTrace]) -> int:
    """Write trajectories with a writer, and return their number.

    Raises:
        Exception: The writer failed.
    """
    left, count = iter(json_traces), 0
    writer.open()
    try:
        while batch := list(islice(left, writer.max_batch)):
            writer.write(batch)
            count += len(batch)
    finally:
        writer.close()
    return count


def _event_values(event: Event, trajectory_id: str) -> dict[str, Any]:
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"event": event.event, "trajectory_id": trajectory_id, **values}


def _parse_trace(line: bytes, *, where: str) -> tuple[JsonTrace, Account]:
    try:
        form = orjson.loads(line)
        version = form["version"]
        if version != VERSION:
            raise DataError(
                f"{where} has version {version}, but this agent-loop reads {VERSION}; upgrade agent-loop"
            )
        return form, account_from_json(form)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} is not a trajectory that rollout.trace.backend=file wrote ({type(error).__name__}: {error}); "
            "give another file, or copy this one again"
        ) from error
