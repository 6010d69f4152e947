"""Rows of the task, and the conversations that earn the reward. Read by make_data.py."""

import json

from warehouse import PART_OF_ORDER, SHELF_OF_PART


def new_row(order):
    """Return a row: the prompt, and what the reward needs to know."""
    question = f"Which shelf holds the part of order {order}?"
    answer = f"Shelf {SHELF_OF_PART[PART_OF_ORDER[order]]}."
    return {"prompt": [{"role": "user", "content": question}], "order": order, "answer": answer}


def solution(row):
    """Return the turns that earn the reward."""
    part = PART_OF_ORDER[row["order"]]
    return [
        call("part_of_order", order=row["order"]),
        {"role": "tool", "content": str(part)},
        call("shelf_of_part", part=part),
        {"role": "tool", "content": str(SHELF_OF_PART[part])},
        {"role": "assistant", "content": row["answer"]},
    ]


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
