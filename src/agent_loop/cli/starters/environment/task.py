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
