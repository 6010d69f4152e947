"""LangGraph agent that evaluates expressions. The code is independent of the training of its model."""

from __future__ import annotations

from typing import Any

import httpx2
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "@": lambda a, b: 3 * a - 2 * b}
"""Functions of the operators. `@` is defined only here."""

BLOCKING_CLIENT = httpx2.Client()
"""Client shared by all rows. LangChain would create one per address, and loading the certificates is slow."""


@tool(parse_docstring=True)
def calculate(a: int, b: int, operand: str) -> int:
    """Compute the result of an operation on two integers.

    Args:
        a: The first number.
        b: The second number.
        operand: One of `+`, `-` and `@`.
    """
    return OPERATIONS[operand](a, b)


def make_graph(llm: ChatOpenAI) -> Any:
    """Return a graph that calls the model and runs its tool calls until the model calls no tool."""
    model = llm.bind_tools([calculate])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", ask)
    graph.add_node("tools", ToolNode([calculate], handle_tool_errors=True))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


async def solve(row: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> None:
    """Answer the question of one row."""
    llm = ChatOpenAI(
        model="policy",
        base_url=base_url,
        api_key=api_key,
        http_client=BLOCKING_CLIENT,
        http_async_client=http_client,
    )
    await make_graph(llm).ainvoke({"messages": row["raw_prompt"]})
