"""Property test: a turn that comes back as items of any equivalent shape is the same turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.harness import examples
from tests.helpers import call_text, text_reply
from tests.serve.harness import MODEL, ProgramHarness, in_order, origins
from tests.serve.test_responses import ADD, AGENTS, PATCH

TOOLS = [ADD, PATCH, AGENTS]


@dataclass(frozen=True)
class Turn:
    """Turn of the model."""

    thought: str
    text: str
    calls: tuple[str, ...]

    @property
    def completion(self) -> str:
        return (
            (f"<think>\n{self.thought}\n</think>\n\n" if self.thought else "")
            + self.text
            + "".join(self.calls)
        )


@dataclass(frozen=True)
class Shape:
    """How a client sends a turn and the results of its calls."""

    has_reasoning: bool
    has_ids: bool
    has_status: bool
    is_easy: bool
    has_results_after_each_call: bool
    has_listed_results: bool
    is_streamed: bool

    def items(self, output: Sequence[dict[str, Any]], number: int) -> list[dict[str, Any]]:
        """Return the items of a turn, with the results of its calls or a new message."""
        kept = [self.item(i) for i in output if self.keeps(i)]
        results = [self.result(item) for item in output if "call_id" in item]
        if self.has_results_after_each_call:
            calls = [item for item in kept if "call_id" in item]
            kept = [item for item in kept if "call_id" not in item]
            results = [each for pair in zip(calls, results, strict=True) for each in pair]
        more = [] if results else [{"role": "user", "content": f"more {number}"}]
        return [*kept, *results, *more]

    def keeps(self, item: dict[str, Any]) -> bool:
        return self.has_reasoning or item["type"] != "reasoning"

    def item(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["type"] == "message" and self.is_easy:
            return {"role": "assistant", "content": item["content"][0]["text"]}
        kept = {"id": self.has_ids, "status": self.has_status}
        return {key: value for key, value in item.items() if kept.get(key, True)}

    def result(self, call: dict[str, Any]) -> dict[str, Any]:
        kind = "custom_tool_call_output" if call["type"] == "custom_tool_call" else "function_call_output"
        text: Any = [{"type": "input_text", "text": "3"}] if self.has_listed_results else "3"
        return {"type": kind, "call_id": call["call_id"], "output": text}


CALLS = st.sampled_from(
    [
        call_text("add", a=1, b=2),
        call_text("add"),
        call_text("apply_patch", input="*** a"),
        call_text("apply_patch", other=[1, 2.0]),
        call_text("agents__spawn"),
    ]
)
TURNS = st.builds(
    Turn,
    thought=st.sampled_from(["", "Hm.", "First this.\nThen that."]),
    text=st.sampled_from(["", "Now:", "One line.\n\n  Another."]),
    calls=st.lists(CALLS, max_size=3).map(tuple),
)
SHAPES = st.builds(Shape, *[st.booleans()] * 7)


@examples(40, derandomize=True, database=None)
@given(st.lists(st.tuples(TURNS, SHAPES), min_size=1, max_size=4))
def test_a_turn_in_any_equivalent_shape_is_the_same_turn(script: list[tuple[Turn, Shape]]) -> None:
    async def program(respond: Any) -> None:
        history: list[Any] = [{"role": "user", "content": "Begin."}]
        for number, (_, shape) in enumerate(script):
            response = await respond(
                model=MODEL, tools=TOOLS, instructions="Help.", stream=shape.is_streamed, input=history
            )
            if shape.is_streamed:
                response = [event async for event in response][-1].response
            output = [item.to_dict() for item in response.output]
            history = [*history, *shape.items(output, number)]
        await respond(model=MODEL, tools=TOOLS, instructions="Help.", input=history)

    replies = [text_reply(turn.completion) for turn, _ in script]
    harness = ProgramHarness(in_order(*replies, text_reply("End.")), prompt_length=9999, response_length=9999)
    [trajectory] = harness.run_virtual(program)
    assert trajectory.output.failure is None
    assert origins(trajectory.output).count("model") == len(script) + 1
    sampled = [
        segment.token_ids.tolist() for segment in trajectory.output.segments if segment.origin == "model"
    ]
    assert sampled == [list(reply.token_ids) for reply in [*replies, text_reply("End.")]]
