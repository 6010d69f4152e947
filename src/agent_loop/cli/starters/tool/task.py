"""The task: which shelf holds the part of an order? The answer takes two calls of tools, one after the other."""

from agent_loop import function_tool
from agent_loop.errors import ToolError
from warehouse import PART_OF_ORDER, SHELF_OF_PART


@function_tool
def part_of_order(order: int) -> int:
    """Tell which part an order is about.

    Args:
        order: The number of the order.
    """
    if order not in PART_OF_ORDER:
        raise ToolError(f"There is no order {order}.")  # the model reads it
    return PART_OF_ORDER[order]


@function_tool
def shelf_of_part(part: int) -> int:
    """Tell which shelf holds a part.

    Args:
        part: The number of the part.
    """
    if part not in SHELF_OF_PART:
        raise ToolError(f"There is no part {part}.")
    return SHELF_OF_PART[part]


def reward(output, row):
    """Return 1 if the last answer names the right shelf, else 0."""
    return 1.0 if output.answer.strip() == row["answer"] else 0.0
