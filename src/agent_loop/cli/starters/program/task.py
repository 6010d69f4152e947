"""The task as a program on the OpenAI client: two tools, and the loop that calls them. It knows nothing of training."""

import json

import openai

from warehouse import PART_OF_ORDER, SHELF_OF_PART


def tool(name, key, description):
    parameters = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("part_of_order", "order", "Tell which part an order is about."),
    tool("shelf_of_part", "part", "Tell which shelf holds a part."),
]


async def solve(row, *, base_url, api_key, http_client):
    """Answer the question of one row."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        messages = list(row["raw_prompt"])
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            if not message.tool_calls:
                return
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": look_up(call.function)}
                for call in message.tool_calls
            ]
            messages = [*messages, message, *results]


def look_up(function):
    """Return the result of a call as text."""
    try:
        arguments = json.loads(function.arguments)
        if function.name == "part_of_order":
            return str(PART_OF_ORDER[arguments["order"]])
        return str(SHELF_OF_PART[arguments["part"]])
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {error!r}"


def reward(output, row):
    """Return 1 if the last answer names the right shelf, else 0."""
    return 1.0 if output.answer.strip() == row["answer"] else 0.0
