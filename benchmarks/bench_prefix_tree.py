"""CPU time and memory of an update on the prefix tree of a batch, against the plain computation of its rows.

    python benchmarks/bench_prefix_tree.py [--quick] [--hidden 256]

The model is a small Qwen3 with random weights, on one thread of a CPU. The plain computation is that of padded rows.
With `actor.share_prefixes`, the default, each distinct token is computed once. `share` is the share of distinct tokens.
`weighted` is the share by arithmetic: products of weights and tokens, and of queries and keys. The CPU times are the
smallest of several alternating rounds, so that other work on the machine matters little. Smaller budgets cut a tree,
and each part repeats the tokens above it; the second table counts them. Memory is the largest resident size of a
process with one update, above that of a tiny update; malloc returns freed memory at once, because its free lists are
not memory that the update needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from random import Random

import torch
from batches import Row, to_batch
from resident_memory import resident_bytes
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agent_loop.config import ActorConfig
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.actor import Actor
from agent_loop.training.forward import as_tree
from agent_loop.training.micro_batches import micro_batches, sorted_rows

VOCABULARY = 2000
NUM_LAYERS = 2
BUDGET = 16_384
"""Tokens of a micro-batch."""
BUDGETS = (16_384, 4096, 2560)
"""Budgets for which repeated tokens are counted."""
CASES = ("group of 8", "10 forks each", "deep, compacted", "64 tiny rows")
AIMS = (1.4, 1.4, 1.3, None)
"""Largest CPU time, relative to the plain computation, divided by the share: of tokens, or by arithmetic if deep."""
MEMORY_SIZES = (4096, 8192, 16_384)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no memory")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--memory", type=int, help="measure one update of a tree of so many tokens, in MB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        print(peak_megabytes(options.memory, hidden=options.hidden))
        return
    console = Console(width=130)
    console.print(times(hidden=options.hidden, num_rounds=1 if options.quick else 3))
    console.print(repetition())
    if not options.quick:
        console.print(memory())


def times(*, hidden: int, num_rounds: int) -> Table:
    """Return the table of CPU times."""
    table = Table(title=f"CPU time of an update, {NUM_LAYERS} layers of {hidden}")
    for column in (
        "batch",
        "tokens",
        "share",
        "weighted",
        "plain, s",
        "tree, s",
        "/share",
        "/weighted",
    ):
        table.add_column(column, justify="right")
    table.add_column("aim")
    for name, aim in zip(CASES, AIMS, strict=True):
        batch = make_batch(name)
        padded, tree = (make_actor(hidden, shares=shares) for shares in (False, True))
        rounds = [[cpu_time(actor, batch) for actor in (padded, tree)] for _ in range(num_rounds)]
        plain_s, tree_s = (min(each) for each in zip(*rounds, strict=True))
        share, weighted = shares_of(batch, tree.model)
        ratio = tree_s / plain_s
        is_deep = name.startswith("deep")
        measured = ratio / (weighted if is_deep else share)
        verdict = (
            ""
            if aim is None
            else f"{'reached' if measured <= aim else 'missed'}: {aim}" + " weighted" * is_deep
        )
        cells = (f"{plain_s:.2f}", f"{tree_s:.2f}", f"{ratio / share:.2f}", f"{ratio / weighted:.2f}")
        num_tokens = int(batch["attention_mask"].sum())
        table.add_row(name, f"{num_tokens}", f"{share:.2f}", f"{weighted:.2f}", *cells, verdict)
    return table


def repetition() -> Table:
    """Return the table of tokens that micro-batches repeat, by the budget of a micro-batch."""
    table = Table(title="Repeated tokens by budget, as a share of the distinct tokens")
    for column in ("batch", "distinct tokens", *map(str, BUDGETS)):
        table.add_column(column, justify="right")
    for name in CASES:
        batch, cells = make_batch(name), list[str]()
        rows = torch.arange(len(batch))
        num_distinct = sorted_rows(batch, rows).num_distinct
        for budget in BUDGETS:
            runs = sorted_rows(batch, rows).divided(max_tokens=budget)
            computed = sum(sorted_rows(batch, torch.tensor(run)).num_distinct for run in runs)
            cells.append(f"{computed / num_distinct - 1:.2f}")
        table.add_row(name, f"{num_distinct}", *cells)
    return table


def memory() -> Table:
    """Return the table of peak memory, each measured in a process of its own."""
    table = Table(title="Peak memory of an update")
    table.add_column("tokens of the tree", justify="right")
    table.add_column("MB", justify="right")
    table.add_column("KB per token", justify="right")
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    for size in MEMORY_SIZES:
        command = [sys.executable, __file__, "--memory", str(size), "--hidden", "128"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        found = float(done.stdout.split()[-1])
        table.add_row(f"{size}", f"{found:.0f}", f"{found * 1000 / size:.0f}")
    return table


def cpu_time(actor: Actor, batch: RolloutBatch) -> float:
    """Return the CPU time of one update, in seconds."""
    advantages_BR = torch.linspace(-1, 1, len(batch))[:, None]
    start_s = time.process_time()
    actor.update(batch, advantages_BR=advantages_BR)
    return time.process_time() - start_s


def peak_megabytes(num_tokens: int, *, hidden: int) -> float:
    """Return by how much an update of a tree of so many tokens raises the peak of the resident size."""
    actor, random = make_actor(hidden, shares=True), Random(0)
    cpu_time(actor, to_batch(group(random, num_rows=2, prompt=8, response=8)))
    before = resident_bytes("VmHWM")
    cpu_time(actor, to_batch(group(random, num_rows=8, prompt=num_tokens // 2, response=num_tokens // 16)))
    return (resident_bytes("VmHWM") - before) / 1e6


def shares_of(batch: RolloutBatch, model: PreTrainedModel) -> tuple[float, float]:
    """Return the share of distinct tokens, and the same weighted by arithmetic."""
    rows, device = torch.arange(len(batch)), torch.device("cpu")
    lengths = batch["attention_mask"].sum(dim=1).numpy()
    num_tree = num_pairs = 0
    for part in micro_batches(batch, rows=rows, max_tokens=BUDGET, device=device, layout="tree"):
        layout, _ = as_tree(part)
        num_tree += layout.num_tokens
        num_pairs += int((layout.depth_T + 1).sum())
    weights = sum(p.numel() for name, p in model.named_parameters() if "layers" in name)
    pair = 2 * NUM_LAYERS * model.config.num_attention_heads * model.config.head_dim

    def arithmetic(num_tokens: int, num_pairs: int) -> int:
        return weights * num_tokens + pair * num_pairs

    plain = arithmetic(int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum()))
    share = sorted_rows(batch, rows).num_distinct / float(lengths.sum())
    return share, arithmetic(num_tree, num_pairs) / plain


def make_actor(hidden: int, *, shares: bool) -> Actor:
    """Return an actor whose model has random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    settings = ActorConfig(share_prefixes=shares, max_tokens_per_micro_batch=BUDGET)
    return Actor(Qwen3ForCausalLM(config), config=settings)


def make_batch(name: str) -> RolloutBatch:
    """Return the batch of a case."""
    random = Random(0)
    match name:
        case "group of 8":
            return to_batch(group(random, num_rows=8, prompt=2000, response=300))
        case "10 forks each":
            return to_batch([row for _ in range(2) for row in forks(random)])
        case "deep, compacted":
            return to_batch(compacted(random))
        case _:
            return to_batch(
                [row for _ in range(8) for row in group(random, num_rows=8, prompt=15, response=15)]
            )


def group(random: Random, *, num_rows: int, prompt: int, response: int) -> list[Row]:
    """Return rows with one prompt and responses of their own."""
    ids = tokens(random, prompt)
    return [(ids, [(tokens(random, response), True)]) for _ in range(num_rows)]


def forks(random: Random) -> list[Row]:
    """Return a trajectory of twelve turns, and ten that branch off at random turns."""

    def turns(number: int) -> list[tuple[list[int], bool]]:
        return [(tokens(random, 35), is_sampled) for _ in range(number) for is_sampled in (True, False)]

    prompt, first = tokens(random, 150), turns(12)
    others = [first[: 2 * start] + turns(12 - start) for start in (random.randrange(12) for _ in range(10))]
    return [(prompt, runs) for runs in (first, *others)]


def compacted(random: Random) -> list[Row]:
    """Return rows of which each keeps a part of one of the last rows, and goes on from there with turns of its own."""
    prompt = tokens(random, 100)
    rows: list[list[tuple[list[int], bool]]] = [[]]
    for number in range(40):
        kept = random.choice(rows[-4:])
        kept = kept[: len(kept) - random.randrange(1 + len(kept) // 3)]
        rows.append([*kept, *((tokens(random, 40), n % 2 == 0) for n in range(2 + number % 5))])
    return [(prompt, row) for row in rows[1:]]


def tokens(random: Random, number: int) -> list[int]:
    return random.choices(range(VOCABULARY), k=number)


if __name__ == "__main__":
    main()
