"""Write rows.jsonl and val_rows.jsonl, and demonstrations.jsonl for a model that knows nothing yet.

    python make_data.py

A demonstration is a conversation of the assistant that is wanted. Most of these give up early, so that the model learns
the format and succeeds sometimes, and reinforcement learning has something to improve.
"""

import json
import random

import task
from conversations import new_row, solution
from warehouse import PART_OF_ORDER

NUM_ROWS, NUM_VAL_ROWS, NUM_DEMONSTRATIONS = 2048, 128, 4000
FIRST_TURN_SHARE, LATER_TURN_SHARE = 0.35, 0.85
"""How often a turn of a demonstration is right, and not the last one."""


def demonstration(row, rng):
    messages, share = list(row["prompt"]), FIRST_TURN_SHARE
    for message in solution(row):
        if message["role"] == "assistant":
            if rng.random() > share:
                messages.append({"role": "assistant", "content": "I do not know."})
                break
            share = LATER_TURN_SHARE
        messages.append(message)
    return {"messages": messages, "tools": getattr(task, "TOOLS", None)}


def write(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    rng = random.Random(0)
    orders = sorted(PART_OF_ORDER)
    rng.shuffle(orders)
    rows = [new_row(order) | getattr(task, "COLUMNS", {}) for order in orders]
    write("val_rows.jsonl", rows[:NUM_VAL_ROWS])
    write("rows.jsonl", rows[NUM_VAL_ROWS:][:NUM_ROWS])
    write("demonstrations.jsonl", [demonstration(row, rng) for row in rows[-NUM_DEMONSTRATIONS:]])
