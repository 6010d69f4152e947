"""CPU time to encode the texts of a trajectory, with `tokenizers` and with `tiktoken`.

    python benchmarks/bench_encoder.py [--quick] [--json FILE]

There are two trajectories: a short one (a prompt of 470 tokens with tools, 3 turns of the model, 2 tool results), and a
long one (a prompt of 2270 tokens, 10 turns of 500 tokens). The floor only encodes the new text, with the same library.
The other columns are calls of `ChatTemplate`, which renders the first prompt and the bridges, and parses the
completions. Times are CPU times, medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_encoding import Writer, cpu_seconds, make_tokenizer
from rich.console import Console
from rich.table import Table

from agent_loop.chat.encoding import EncoderChoice
from agent_loop.chat.template import ChatTemplate
from agent_loop.types import IntArray, Message, as_token_ids

LIBRARIES: tuple[EncoderChoice, ...] = ("tokenizers", "tiktoken")
NUM_VARIANTS = 20
"""Trajectories of a workload. Each has its own texts; system prompt and tools are shared."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload with its lengths in tokens."""

    name: str
    system: int
    question: int
    num_turns: int
    turn: int
    reply: int


WORKLOADS = (
    Workload("short", system=190, question=40, num_turns=3, turn=100, reply=78),
    Workload("long", system=1980, question=60, num_turns=10, turn=500, reply=500),
)


@dataclass(frozen=True, slots=True)
class Script:
    """Texts of one trajectory."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    completions: list[list[int]]
    replies: list[Message]
    head: str
    """Rendered prompt before the question."""


class Candidate:
    """Chat template with one encoding library, and the compared ways to encode a trajectory."""

    def __init__(self, tokenizer: Any, library: EncoderChoice) -> None:
        self.library = library
        self.template = ChatTemplate(tokenizer, encoder=library)

    def floor(self, script: Script) -> list[list[int]]:
        """Encode the question and the tool results, with the constant text around them."""
        encode = self.template.encoder.encode
        question = script.messages[-1]["content"]
        texts = [f"{question}<|im_end|>\n<|im_start|>assistant\n"]
        texts += [
            f"\n<|im_start|>user\n<tool_response>\n{reply['content']}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            for reply in script.replies
        ]
        return [encode(text) for text in texts]

    def floor_with_head(self, script: Script) -> list[list[int]]:
        """Encode the same as `floor`, and the constant beginning of the prompt."""
        return [self.template.encoder.encode(script.head), *self.floor(script)]

    def rendered(self, script: Script) -> list[IntArray]:
        """Encode the prompt and the tool results as an episode does."""
        opened = self.template.open(script.messages, tools=script.tools)
        return [opened, *(self.template.bridge([reply]) for reply in script.replies)]

    def parse(self, script: Script) -> None:
        context = as_token_ids(script.completions[0])
        for completion in script.completions:
            self.template.parse(completion, context=context)


def script_of(workload: Workload, writer: Writer, tokenizer: Any, *, number: int) -> Script:
    backend = tokenizer.backend_tokenizer
    end = backend.token_to_id("<|im_end|>")
    chance = random.Random(number)
    system = Writer(seed=7).text_of(workload.system, backend)
    tools = [tool(name) for name in ("search",)]
    completions = [
        [*backend.encode(writer.text_of(workload.turn, backend)).ids, end] for _ in range(workload.num_turns)
    ]
    replies: list[Message] = [
        {
            "role": "tool",
            "name": "search",
            "tool_call_id": f"call_{chance.getrandbits(64):x}",
            "content": text,
        }
        for text in (writer.text_of(workload.reply, backend) for _ in range(workload.num_turns - 1))
    ]
    question = writer.text_of(workload.question, backend)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    head = tokenizer.apply_chat_template(messages[:1], tools=tools, tokenize=False)
    return Script(messages, tools, completions, replies, head)


def tool(name: str) -> dict[str, Any]:
    text = {"type": "string", "description": f"What to {name}."}
    parameters = {"type": "object", "properties": {"query": text, "language": text}, "required": ["query"]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does a {name}.", "parameters": parameters},
    }


def measure(candidates: list[Candidate], scripts: list[Script], *, num_rounds: int) -> dict[str, float]:
    """Return milliseconds per trajectory, by library and way. Rounds alternate between the ways."""
    ways: dict[str, Callable[[Script], object]] = {}
    for one in candidates:
        for way in (one.floor_with_head, one.floor, one.rendered, one.parse):
            ways[f"{one.library}: {way.__name__}"] = way
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, way in ways.items():
            times[name].append(
                cpu_seconds(lambda way=way: [way(script) for script in scripts]) / len(scripts)
            )
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def check(candidates: list[Candidate], scripts: list[Script]) -> None:
    """Check that both libraries return the same ids."""
    first, second = (
        [[list(ids) for ids in one.rendered(script)] for script in scripts] for one in candidates
    )
    if first != second:
        raise SystemExit("the ids of the two libraries differ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all medians to this file")
    options = parser.parse_args()
    writer = Writer(seed=0)
    tokenizer = make_tokenizer(writer)
    candidates = [Candidate(tokenizer, library) for library in LIBRARIES]
    results: dict[str, dict[str, float]] = {}
    for workload in WORKLOADS:
        scripts = [script_of(workload, writer, tokenizer, number=number) for number in range(NUM_VARIANTS)]
        check(candidates, scripts)
        results[workload.name] = measure(candidates, scripts, num_rounds=3 if options.quick else 9)
        num_tokens = len(candidates[0].template.open(scripts[0].messages, tools=scripts[0].tools))
        table = Table(title=f"{workload.name}: prompt of {num_tokens} tokens, ms of CPU per trajectory")
        for column in (
            "library",
            "head + new text",
            "new text alone",
            "prompt and bridges",
            "to new text",
            "parse",
        ):
            table.add_column(column, justify="left" if column == "library" else "right")
        for library in LIBRARIES:
            medians = {way: results[workload.name][f"{library}: {way}"] for way in WAYS}
            cells = [medians[way] for way in WAYS[:3]]
            ratio = medians["rendered"] / medians["floor"]
            table.add_row(
                library, *(f"{cell:.3f}" for cell in cells), f"{ratio:.2f}", f"{medians['parse']:.3f}"
            )
        Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


WAYS = ("floor_with_head", "floor", "rendered", "parse")

if __name__ == "__main__":
    main()
