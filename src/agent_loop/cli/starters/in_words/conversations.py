"""Rows of the task, and the conversations that earn the reward. Read by make_data.py."""

from warehouse import PART_OF_ORDER, SHELF_OF_PART


def new_row(order):
    """Return a row: the prompt, and what the reward needs to know."""
    return {
        "prompt": [{"role": "user", "content": f"Which shelf holds the part of order {order}?"}],
        "order": order,
        "answer": f"Shelf {SHELF_OF_PART[PART_OF_ORDER[order]]}.",
    }


def solution(row):
    """Return the turns that earn the reward."""
    part = PART_OF_ORDER[row["order"]]
    return [
        {"role": "assistant", "content": f"Part of {row['order']}?"},
        {"role": "user", "content": f"{part}."},
        {"role": "assistant", "content": f"Shelf of {part}?"},
        {"role": "user", "content": f"{SHELF_OF_PART[part]}."},
        {"role": "assistant", "content": row["answer"]},
    ]
