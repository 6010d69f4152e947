"""Rows of this package from the batches of verl."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agent_loop.chat.messages import normalise_messages, without_added_nulls
from agent_loop.integrations.verl.manager.loops import loop_name
from agent_loop.integrations.verl.manager.record import RECORD, VerlRecord
from agent_loop.integrations.verl.manager.verl_package import load_verl
from agent_loop.types import Row


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Names of tools and loops that rows may use. verl ignores others."""

    tools: Collection[str]
    has_interactions: bool
    default_agent_loop: str
    is_text: bool
    """See `loop_name`."""


def read_batch(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row of a `DataProto`."""
    columns: Mapping[str, Any] = batch.non_tensor_batch
    for index in range(len(batch)):
        yield {name: values[index] for name, values in columns.items()}


def read_tensordict(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row of a `TensorDict`. Columns with one value have this value in each row."""
    one, several = load_verl("tensordict:NonTensorData"), load_verl("tensordict:NonTensorStack")
    columns = dict(batch.items())
    for index in range(len(batch)):
        row: dict[str, Any] = {}
        for name, values in columns.items():
            if isinstance(values, several):
                row[name] = values[index].data
            elif isinstance(values, one):
                row[name] = values.data
            else:
                row[name] = values[index]
        yield row


def make_row(columns: dict[str, Any], names: KnownNames, *, is_greedy: bool = False) -> Row:
    """Return a row for a loop of this package, with its record in the column `RECORD`.

    Args:
        columns: The columns in verl's form, without those that verl removes before it calls a loop.
        names: Names that the row may use.
        is_greedy: Whether the row asks for the likeliest tokens.
    """
    agent_name = str(columns.pop("agent_name", names.default_agent_loop))
    record = VerlRecord(columns, agent_name=agent_name, is_greedy=is_greedy)
    prompt = without_added_nulls({"raw_prompt": list(columns["raw_prompt"])})  # verl reads rows with Arrow
    row = {
        **columns,
        "raw_prompt": normalise_messages(prompt["raw_prompt"], where="raw_prompt"),
        "agent_name": loop_name(agent_name, is_text=names.is_text),
        RECORD: record,
    }
    tools_kwargs = cast(Mapping[str, Any], row.pop("tools_kwargs", None) or {})
    row["tools_kwargs"] = {name: kwargs for name, kwargs in tools_kwargs.items() if name in names.tools}
    interaction = cast(Mapping[str, Any], row.pop("interaction_kwargs", None) or {})
    if interaction and names.has_interactions:
        row["interaction_kwargs"] = interaction
    selection = _mapping(columns.get("extra_info")).get("tool_selection")
    if selection is not None and len(selection):
        row["tool_selection"] = [name for name in selection if name in names.tools]
    return row


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
