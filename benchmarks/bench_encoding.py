"""CPU time to encode a turn in a conversation of 200 turns and 140,000 tokens.

    python benchmarks/bench_encoding.py [--quick] [--json FILE]

A turn is the bridge after a completion (end of turn, tool result, next prompt) and its entry in the ledger. Its CPU
time is compared early and late in the conversation, with the bare cost of encoding the same text with the same library,
and with rendering and encoding the whole conversation with `tokenizers`. All three are measured turn by turn in the
same rounds. The table shows medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcome import conclude
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_loop.chat.template import ChatTemplate
from agent_loop.episode.ledger import TokenLedger
from agent_loop.types import Message, Origin, TokenOutput

NUM_TURNS = 200
COMPLETION_TOKENS = 100
REPLY_TOKENS = 600
WATCHED = (10, 100, 200)
WINDOW = 10
"""Number of measured turns up to and including a watched turn."""
NUM_CONTROL_TOKENS = 200
TARGET_OF_GROWTH = 1.2
TARGET_OF_BARE = 3.0

TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{{ messages[0].content }}

# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
<|im_end|>
{%- set messages = messages[1:] %}
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
MARKERS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU times of one turn."""

    round: int
    turn: int
    num_tokens: int
    bridge_s: float
    bare_s: float
    full_s: float | None


class Writer:
    """Generator of random texts with a given number of tokens."""

    def __init__(self, *, seed: int) -> None:
        self._rng = random.Random(seed)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["".join(self._rng.choices(letters, k=self._rng.randint(2, 9))) for _ in range(6000)]

    def text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(self._words, k=num_words))

    def text_of(self, num_tokens: int, tokenizer: Tokenizer) -> str:
        ids = tokenizer.encode(self.text(num_tokens), add_special_tokens=False).ids[:num_tokens]
        return tokenizer.decode(ids)


def make_tokenizer(writer: Writer) -> Any:
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator((writer.text(200) for _ in range(400)), trainer)
    controls = [*MARKERS, *(f"<|reserved_{i}|>" for i in range(NUM_CONTROL_TOKENS))]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def converse(template: ChatTemplate, writer: Writer, *, number: int) -> Iterator[Sample]:
    """Run one conversation, and yield the measurements of the watched turns."""
    backend: Tokenizer = template.tokenizer.backend_tokenizer
    end = template.encoder.encode("<|im_end|>")
    messages: list[Message] = [{"role": "user", "content": writer.text(40)}]
    ledger = TokenLedger()
    ledger.append(template.open(messages), origin=Origin.PROMPT)
    for turn in range(1, NUM_TURNS + 1):
        answer = writer.text_of(COMPLETION_TOKENS, backend)
        completion = [*template.encode(answer), *end]
        ledger.append_completion(TokenOutput(completion, [-0.5] * len(completion), "stop"))
        reply: Message = {"role": "tool", "name": "search", "content": writer.text_of(REPLY_TOKENS, backend)}
        messages += [{"role": "assistant", "content": answer}, reply]
        text = template.decode(template.bridge([reply]))

        def bridge(reply: Message = reply) -> None:
            ids = template.bridge([reply], last_token_id=ledger.last_token_id)
            ledger.append(ids, origin=Origin.TOOL)

        def bare(text: str = text) -> object:
            return template.encoder.encode(text)

        def full(messages: list[Message] = messages) -> object:
            rendered = template.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            return backend.encode(rendered, add_special_tokens=False).ids

        # Alternate the order, so that neither always finds the words in the tokenizer's cache.
        first, second = (bridge, bare) if turn % 2 else (bare, bridge)
        seconds = {first: cpu_seconds(first), second: cpu_seconds(second)}
        if any(watched - WINDOW < turn <= watched for watched in WATCHED):
            full_s = cpu_seconds(full) if turn in WATCHED else None
            yield Sample(number, turn, len(ledger.context), seconds[bridge], seconds[bare], full_s)


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def near(samples: list[Sample], watched: int) -> list[Sample]:
    return [sample for sample in samples if watched - WINDOW < sample.turn <= watched]


def cost(samples: list[Sample], watched: int) -> float:
    return statistics.median(sample.bridge_s for sample in near(samples, watched))


def growth(samples: list[Sample], watched: int) -> float:
    """Return the ratio of the cost at a turn to that at the first watched turn, as the median of the rounds."""
    rounds = sorted({sample.round for sample in samples})
    own = [[sample for sample in samples if sample.round == number] for number in rounds]
    return statistics.median(cost(of_round, watched) / cost(of_round, WATCHED[0]) for of_round in own)


def over_bare(samples: list[Sample], watched: int) -> float:
    return statistics.median(sample.bridge_s / sample.bare_s for sample in near(samples, watched))


def print_table(samples: list[Sample]) -> None:
    table = Table(title="CPU time to encode a turn")
    for column in (
        "turn",
        "tokens so far",
        "bridge, ms",
        "ratio to turn 10",
        "bare, ms",
        "ratio to bare",
        "whole conversation, ms",
    ):
        table.add_column(column, justify="right")
    for watched in WATCHED:
        at = [sample for sample in samples if sample.turn == watched]
        full = [sample.full_s for sample in at if sample.full_s is not None]
        table.add_row(
            str(watched),
            f"{at[0].num_tokens:,}",
            f"{cost(samples, watched) * 1e3:.2f}",
            f"{growth(samples, watched):.2f}",
            f"{statistics.median(sample.bare_s for sample in near(samples, watched)) * 1e3:.2f}",
            f"{over_bare(samples, watched):.2f}",
            f"{statistics.median(full) * 1e3:.1f}" if full else "",
        )
    Console(width=120).print(table)


def missed_targets(samples: list[Sample]) -> list[str]:
    missed: list[str] = []
    for watched in WATCHED:
        if (got := growth(samples, watched)) > TARGET_OF_GROWTH:
            missed.append(f"turn {watched}: {got:.2f} times turn {WATCHED[0]}, above {TARGET_OF_GROWTH}")
        if (got := over_bare(samples, watched)) > TARGET_OF_BARE:
            missed.append(f"turn {watched}: {got:.2f} times the bare cost, above {TARGET_OF_BARE}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round; targets are not enforced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    options = parser.parse_args()
    writer = Writer(seed=0)
    template = ChatTemplate(make_tokenizer(writer))
    samples: list[Sample] = []
    for number in range(1 if options.quick else 5):
        samples += converse(template, writer, number=number)
    print_table(samples)
    conclude(samples, missed=missed_targets(samples), json_file=options.json, is_quick=options.quick)


if __name__ == "__main__":
    main()
