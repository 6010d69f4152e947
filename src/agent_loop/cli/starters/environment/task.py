"""The task as an environment: ask in words for a part and a shelf, then name the shelf."""

import re

from agent_loop.environments.base import Environment, Reply
from warehouse import PART_OF_ORDER, SHELF_OF_PART


class Warehouse(Environment):
    """One conversation. Answers two kinds of questions; any other sentence ends it."""

    def reset(self, row):
        """Begin with a row. The prompt is the row's own, so there is no further observation."""
        self.right, self.is_right = row["answer"], False

    def reply(self, messages):
        """Answer the assistant's last message."""
        text = messages[-1]["content"].strip()
        for pattern, table in ((r"Part of (\d+)\?", PART_OF_ORDER), (r"Shelf of (\d+)\?", SHELF_OF_PART)):
            if (found := re.fullmatch(pattern, text)) and int(found[1]) in table:
                return Reply(f"{table[int(found[1])]}.")
        self.is_right = text == self.right
        return Reply("", is_over=True)

    def reward(self, messages):
        """Return 1 if the last sentence named the right shelf, else 0."""
        return float(self.is_right)


# The rest is for make_data.py alone.


def new_row(order):
    """Return a row: the prompt, and what the environment needs to know."""
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
