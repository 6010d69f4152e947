"""Compares a completion with what its request demanded."""

from __future__ import annotations

import json
from collections.abc import Iterator

from agent_loop.chat.parsers.json_calls import JsonFault, decode_json
from agent_loop.gateway.turn_plan import TurnPlan
from agent_loop.runtime.describe import one_line
from agent_loop.tools.json_schema import BoundedValidator, InvalidSchema, TooManySteps, check_applicable
from agent_loop.types import Message


def unmet_demands(plan: TurnPlan, message: Message) -> Iterator[str]:
    """Yield what the message of a turn lacks: a call that the request forced, or JSON that matches its schema."""
    request = plan.request
    if request.forces_call and not message["tool_calls"]:
        name = request.forced_tool or "a tool"
        yield f"tool_choice forces a call of {name}, but the completion has no valid call"
    if plan.json_schema and not message["tool_calls"]:
        fault = _schema_fault(str(message["content"]), json_schema=plan.json_schema)
        if fault is not None:
            yield f"response_format: the completion does not match the schema: {fault}"


def _schema_fault(text: str, *, json_schema: str) -> str | None:
    """Return the first way in which a text does not match a schema; None if it matches."""
    try:
        value = decode_json(text)
    except JsonFault as fault:
        return f"it is not valid JSON: {fault}"
    schema = json.loads(json_schema)
    try:
        check_applicable(schema)
        errors = BoundedValidator(schema).find_errors(value)
    except (InvalidSchema, TooManySteps) as error:
        return f"it cannot be checked: {error}"
    return one_line(errors[0].message, max_length=200) if errors else None
