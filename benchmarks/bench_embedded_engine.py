"""Tokens per second of the embedded engine against two engines of `transformers`, and vLLM.

    python benchmarks/bench_embedded_engine.py [--model FOLDER] [--vllm PYTHON] [--quick] [--json FILE]

The peers are `generate` on one padded batch, and continuous batching. All sample at temperature 1 on their own copies
of a small random model, with the same number of threads, in one process. Rounds alternate between the engines. The
table shows medians of the speeds, and medians of the ratios within a round, which other load on the machine affects
least. `--model` measures a pretrained model in its own dtype instead. With it, `--vllm` adds vLLM, which runs in a
process of the given interpreter. With `--deterministic`, the only peer is the embedded engine with
`rollout.deterministic`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from outcome import conclude
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.types import SamplingParams

VOCAB_SIZE = 2048
OURS, PADDED, CONTINUOUS, VLLM = "embedded", "generate, padded", "continuous batching", "vLLM"
DETERMINISTIC = "embedded, deterministic"
TARGETS = {PADDED: (0.7, 1), CONTINUOUS: (1.5, 32)}
TARGETS_OF_MODEL = {PADDED: (1.3, 32), CONTINUOUS: (1.5, 32), VLLM: (1.0, 8)}
"""Least ratio of our speed to each peer's, and from how many requests on; on the random model and on another."""
RESULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are sent at the same time."""

    concurrency: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.concurrency} x ({self.prompt_tokens} + {self.new_tokens})"

    def prompts(self, *, seed: int, vocab_size: int) -> list[list[int]]:
        # Each workload has its own seed, because a repeated prompt would be in the prefix cache.
        rng = np.random.default_rng([seed, self.concurrency, self.prompt_tokens])
        return rng.integers(1, vocab_size, (self.concurrency, self.prompt_tokens)).tolist()


WORKLOADS = (
    Workload(1, 64, 128),
    Workload(8, 64, 128),
    Workload(32, 64, 128),
    Workload(64, 64, 128),
    Workload(32, 900, 64),
)
WORKLOADS_OF_MODEL = (Workload(1, 64, 64), Workload(8, 64, 64), Workload(32, 64, 64))


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one run of an engine."""

    engine: str
    workload: Workload
    round: int
    wall_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.workload.concurrency * self.workload.new_tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.workload.concurrency * self.workload.new_tokens / self.cpu_s


class BenchmarkedEngine(Protocol):
    """Engine that samples all completions to their full length."""

    name: str

    def run(self, workload: Workload, prompts: list[list[int]]) -> tuple[float, float]:
        """Sample the completions, and return wall and CPU seconds without the preparation."""
        ...


class Embedded:
    def __init__(self, model: Any, *, max_model_len: int, threads: int, deterministic: bool = False) -> None:
        self.name = DETERMINISTIC if deterministic else OURS
        config = EmbeddedConfig(
            max_slots=64, max_model_len=max_model_len, num_threads=threads, deterministic=deterministic
        )
        self._server = EmbeddedServer(model, config=config)
        self._loop = asyncio.new_event_loop()

    def run(self, workload: Workload, prompts: list[list[int]]) -> tuple[float, float]:
        params = SamplingParams(max_tokens=workload.new_tokens)

        async def generate_all() -> None:
            async with asyncio.TaskGroup() as group:
                for i, prompt in enumerate(prompts):
                    ids = np.asarray(prompt, dtype=np.int32)
                    group.create_task(self._server.generate(ids, params, str(i)))

        return clocked(lambda: self._loop.run_until_complete(generate_all()))


class PaddedGenerate:
    name = PADDED

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, workload: Workload, prompts: list[list[int]]) -> tuple[float, float]:
        ids = torch.tensor(prompts)
        return clocked(
            lambda: self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=workload.new_tokens,
                max_new_tokens=workload.new_tokens,
                pad_token_id=0,
            )
        )


class ContinuousBatching:
    name = CONTINUOUS

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, workload: Workload, prompts: list[list[int]]) -> tuple[float, float]:
        generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, max_new_tokens=workload.new_tokens, eos_token_id=-1
        )
        # Capacity for 64 sequences of 1024 tokens, and the same prefill budget as the embedded engine.
        batching_config = ContinuousBatchingConfig(
            page_size=64, num_blocks=1024, max_batch_tokens=576, max_requests_per_batch=64
        )
        manager = self._model.init_continuous_batching(generation_config, batching_config)
        manager.start()
        try:
            self._collect(manager, prompts[:1])
            return clocked(lambda: self._collect(manager, prompts))
        finally:
            manager.stop(block=True)

    def _collect(self, manager: Any, prompts: list[list[int]]) -> None:
        manager.add_requests(prompts)
        for _ in prompts:
            result = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")


class Vllm:
    """vLLM in an environment of its own: `vllm_peer.py`, which takes and answers lines of JSON."""

    name = VLLM

    def __init__(self, python: Path, model: Path, *, threads: int) -> None:
        command = [str(python), str(Path(__file__).with_name("vllm_peer.py")), str(model), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, workload: Workload, prompts: list[list[int]]) -> tuple[float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([prompts, workload.new_tokens]), file=self._process.stdin, flush=True)
        wall_s, cpu_s = json.loads(self._process.stdout.readline())
        return wall_s, cpu_s


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def make_model() -> Any:
    """Return a Qwen3 model with 3.7 million random parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.eval()


def measure(
    engines: list[BenchmarkedEngine], workloads: tuple[Workload, ...], *, rounds: int, vocab_size: int
) -> list[Sample]:
    """Run every engine once per round and workload, after one small warm-up run."""
    for engine in engines:
        warm_up = Workload(2, 16, 8)
        engine.run(warm_up, warm_up.prompts(seed=0, vocab_size=vocab_size))
    samples: list[Sample] = []
    for workload in workloads:
        for number in range(rounds):
            prompts = workload.prompts(seed=number + 1, vocab_size=vocab_size)
            # Rotate the order, so that no engine always follows the same other engine.
            for engine in engines[number % len(engines) :] + engines[: number % len(engines)]:
                wall_s, cpu_s = engine.run(workload, prompts)
                samples.append(Sample(engine.name, workload, number, wall_s, cpu_s))
    return samples


def ratio(samples: list[Sample], workload: Workload, peer: str, *, of_cpu: bool = False) -> float:
    """Return the ratio of our tokens per second to the peer's, as the median of the rounds."""

    def speeds(engine: str) -> list[float]:
        own = [s for s in samples if (s.engine, s.workload) == (engine, workload)]
        return [s.tokens_per_cpu_s if of_cpu else s.tokens_per_s for s in own]

    return statistics.median(a / b for a, b in zip(speeds(OURS), speeds(peer), strict=True))


def print_table(samples: list[Sample], engines: list[str], workloads: tuple[Workload, ...]) -> None:
    table = Table(title="new tokens per second of wall time (of CPU time)")
    table.add_column("requests x (prompt + new)")
    for name in engines:
        table.add_column(name, justify="right")
    for name in engines[1:]:
        table.add_column(f"ratio to {name}", justify="right", max_width=20)
    for workload in workloads:
        cells = [str(workload)]
        for name in engines:
            own = [s for s in samples if (s.engine, s.workload) == (name, workload)]
            wall = statistics.median(s.tokens_per_s for s in own)
            cpu = statistics.median(s.tokens_per_cpu_s for s in own)
            cells.append(f"{wall:.0f} ({cpu:.0f})")
        for name in engines[1:]:
            wall = ratio(samples, workload, name)
            cpu = ratio(samples, workload, name, of_cpu=True)
            cells.append(f"{wall:.2f} ({cpu:.2f})")
        table.add_row(*cells)
    Console(width=140).print(table)


def missed_targets(
    samples: list[Sample], workloads: tuple[Workload, ...], targets: dict[str, tuple[float, int]]
) -> list[str]:
    engines = {sample.engine for sample in samples}
    missed: list[str] = []
    for workload in workloads:
        for peer, (target, from_concurrency) in targets.items():
            if peer not in engines or workload.concurrency < from_concurrency:
                continue
            got = ratio(samples, workload, peer)
            if got < target:
                missed.append(f"{workload}: {got:.2f} times {peer}, below {target}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of two short workloads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--deterministic", action="store_true", help="compare with deterministic sampling")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="measure this model")
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="interpreter that has vLLM; needs --model"
    )
    options = parser.parse_args()
    if options.vllm and not options.model:
        parser.error("--vllm needs --model")
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    workloads = WORKLOADS_OF_MODEL if options.model else WORKLOADS
    if options.quick:
        workloads = (Workload(8, 64, 32), Workload(32, 64, 32))
    model: Any = (
        transformers.AutoModelForCausalLM.from_pretrained(options.model).eval()
        if options.model
        else make_model()
    )
    embedded: dict[str, Any] = {
        "max_model_len": max(each.prompt_tokens + each.new_tokens for each in workloads),
        "threads": options.threads,
    }
    engines: list[BenchmarkedEngine] = [Embedded(copy.deepcopy(model), **embedded)]
    if options.deterministic:
        engines.append(Embedded(copy.deepcopy(model), **embedded, deterministic=True))
    else:
        engines += [PaddedGenerate(copy.deepcopy(model)), ContinuousBatching(copy.deepcopy(model))]
    if options.vllm:
        engines.append(Vllm(options.vllm, options.model, threads=options.threads))
    samples = measure(
        engines, workloads, rounds=1 if options.quick else 3, vocab_size=model.config.vocab_size
    )
    print_table(samples, [engine.name for engine in engines], workloads)
    targets = TARGETS_OF_MODEL if options.model else TARGETS
    missed = [] if options.deterministic else missed_targets(samples, workloads, targets)
    conclude(samples, missed=missed, json_file=options.json, is_quick=options.quick)


if __name__ == "__main__":
    main()
