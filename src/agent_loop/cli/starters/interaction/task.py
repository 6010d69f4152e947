"""The task: ask a clerk, in words, which shelf holds the part of an order. The clerk is the interaction."""

import re

from agent_loop import BaseInteraction
from warehouse import PART_OF_ORDER, SHELF_OF_PART

COLUMNS = {"interaction_kwargs": {"name": "clerk"}}
"""Columns of every row: the interaction of its trajectories."""


class Clerk(BaseInteraction):
    """Answers two kinds of questions. Any other sentence ends the conversation."""

    async def generate_response(self, instance_id, messages, **kwargs):
        """Return whether the conversation ends, the clerk's reply, a score, and further numbers."""
        question = messages[-1]["content"].strip()
        for pattern, table in ((r"Part of (\d+)\?", PART_OF_ORDER), (r"Shelf of (\d+)\?", SHELF_OF_PART)):
            if (found := re.fullmatch(pattern, question)) and int(found[1]) in table:
                return False, f"{table[int(found[1])]}.", 0.0, {}
        return True, "", 0.0, {}


def reward(output, row):
    """Return 1 if the last answer names the right shelf, else 0."""
    return 1.0 if output.answer.strip() == row["answer"] else 0.0
