"""What the `file` backend wrote, read back, and told elsewhere."""

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
from agent_loop.tracing.delivery import BatchWriter
from agent_loop.tracing.events import Event
from agent_loop.tracing.forms import VERSION, Form, account_of
from agent_loop.tracing.reading import events_of

logger = logging.getLogger(__name__)


def read_traces(path: Path) -> Iterator[tuple[Form, Account]]:
    """The trajectories of a file, as they are stored and as what that says, in the order in which they ended. A last
    line that was not written to its end, as where the process was killed, is left out, and said.

    Raises:
        DataError: There is no such file, or a line of it is no trajectory.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    logger.warning("%s: line %d is not whole, and left out", path, number)
                    return
                yield _trace_in(line, where=f"{path}, line {number}")
    except OSError as error:
        raise DataError(
            f"{str(path)!r} cannot be read ({error}); give what rollout.trace.path named"
        ) from error


def read_accounts(path: Path) -> Iterator[Account]:
    """The trajectories of a file, as `read_traces` finds them."""
    return (account for _, account in read_traces(path))


def event_lines(account: Account) -> Iterator[bytes]:
    """A trajectory's events as lines of JSON."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    for event in events_of(account):
        yield orjson.dumps(_named(event, account.attributes.trajectory_id), option=options)


def send(forms: Iterable[Form], *, writer: BatchWriter[Form]) -> int:
    """Has a writer tell of them.

    Returns:
        How many there were.

    Raises:
        Exception: The writer could not.
    """
    left, count = iter(forms), 0
    writer.open()
    try:
        while batch := list(islice(left, writer.max_batch)):
            writer.write(batch)
            count += len(batch)
    finally:
        writer.close()
    return count


def _named(event: Event, trajectory_id: str) -> dict[str, Any]:
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"event": event.event, "trajectory_id": trajectory_id, **values}


def _trace_in(line: bytes, *, where: str) -> tuple[Form, Account]:
    try:
        form = orjson.loads(line)
        version = form["version"]
        if version != VERSION:
            raise DataError(f"{where} has version {version}, and this reads {VERSION}; upgrade agent-loop")
        return form, account_of(form)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where} is no trajectory that rollout.trace.backend=file wrote ({type(error).__name__}: {error}); "
            "give another file, or copy this one again"
        ) from error
