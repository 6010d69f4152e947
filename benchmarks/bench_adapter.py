"""Log-probs of a model with LoRA adapters, from everything that computes them.

    python benchmarks/bench_adapter.py RUN [--threads 1] [--json FILE]

RUN is a finished run with `model.lora_rank`. Its adapters are exported with `--keep-adapter`, and once more merged. The
texts are the first trajectories of its last step. PEFT in float32, on the exported adapters, is the reference. PEFT,
the trainer, and the embedded engine with the merged model compute in the dtype of the run. The table shows the
differences to the reference at the sampled tokens, in nats. For scale, the last row is the base model, which has no
adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers
from batches import to_batch
from outcome import conclude
from peft import PeftModel
from rich.console import Console
from rich.table import Table

from agent_loop.config import ActorConfig, ModelConfig
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.training.actor import Actor
from agent_loop.training.checkpoint import Checkpoint, latest_checkpoint
from agent_loop.training.export import evaluated_model, export_model
from agent_loop.training.policy import compute_dtype, load_policy

NUM_TEXTS = 16
MAX_TOKENS = 512
"""Largest number of tokens of a text."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a stored trajectory."""

    prompt_ids: list[int]
    response_ids: list[int]
    is_sampled: list[int]
    """1 at the sampled tokens of the response."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of log-probs to the reference, in nats."""

    way: str
    mean: float
    largest: float


LogProbs = list[np.ndarray[Any, Any]]
"""Log-probs of the tokens of each response."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    checkpoint = latest_checkpoint(options.run)
    texts = read_texts(options.run)
    config = ModelConfig.model_validate(checkpoint.config["model"])
    dtype = compute_dtype(config)
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder, "adapter")
        export_model(checkpoint, adapter, keep_adapter=True)
        ways: dict[str, Callable[[], LogProbs]] = {
            "PEFT": lambda: of_model(with_peft(config.path, adapter, dtype), texts),
            "trainer": lambda: of_trainer(checkpoint, config, texts),
            "embedded engine": lambda: asyncio.run(of_engine(evaluated_model(options.run), dtype, texts)),
            "base model": lambda: of_model(base(config.path, dtype), texts),
        }
        reference = of_model(with_peft(config.path, adapter, torch.float32), texts)
        results = [difference(way, compute(), reference, texts) for way, compute in ways.items()]
    table = Table(title=f"log-probs in {dtype}, compared with PEFT in float32")
    for column in ("computed by", "mean difference", "largest"):
        table.add_column(column, justify="left" if column == "computed by" else "right")
    for each in results:
        table.add_row(each.way, f"{each.mean:.4f}", f"{each.largest:.3f}")
    Console().print(table)
    conclude(results, missed=(), json_file=options.json, is_quick=False)


def read_texts(run: Path) -> list[Text]:
    """Return the first trajectories of the last step."""
    last = max((run / "trajectories").glob("train-*.parquet"))
    rows = pq.read_table(last, columns=["prompt_ids", "response_ids", "response_mask"])  # pyright: ignore
    return [Text(*row.values()) for row in rows.slice(0, NUM_TEXTS).to_pylist()]


def base(path: str, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def with_peft(path: str, adapter: Path, dtype: torch.dtype) -> Any:
    return PeftModel.from_pretrained(base(path, dtype), str(adapter)).eval()


def of_model(model: Any, texts: Sequence[Text]) -> LogProbs:
    """Return the log-probs of a forward of each text."""
    found: LogProbs = []
    for text in texts:
        ids = torch.tensor([text.prompt_ids + text.response_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[-len(text.response_ids) :, 0].numpy())
    return found


def of_trainer(checkpoint: Checkpoint, config: ModelConfig, texts: Sequence[Text]) -> LogProbs:
    """Return the log-probs of the trainer's model, which is laid out as it is trained."""
    model = load_policy(config, path=checkpoint.model_path)
    actor = Actor(model, config=ActorConfig(max_tokens_per_micro_batch=2048), dtype=compute_dtype(config))
    batch = to_batch([(text.prompt_ids, [(text.response_ids, True)]) for text in texts])
    rows = actor.logprobs(batch).numpy()
    return [row[: len(text.response_ids)] for row, text in zip(rows, texts, strict=True)]


async def of_engine(model_path: Path, dtype: torch.dtype, texts: Sequence[Text]) -> LogProbs:
    """Return the scores of the embedded engine, which has the merged model."""
    server = EmbeddedServer(base(str(model_path), dtype), config=EmbeddedConfig(max_model_len=MAX_TOKENS))
    found: LogProbs = []
    for text in texts:
        ids = np.asarray(text.prompt_ids + text.response_ids, dtype=np.int32)
        found.append((await server.score(ids, start=len(text.prompt_ids))).logprobs)
    return found


def difference(way: str, found: LogProbs, reference: LogProbs, texts: Sequence[Text]) -> Difference:
    """Return the differences at the sampled tokens."""
    gaps = np.concatenate(
        [
            np.abs(one - other)[np.asarray(text.is_sampled, dtype=bool)]
            for one, other, text in zip(found, reference, texts, strict=True)
        ]
    )
    return Difference(way, float(gaps.mean()), float(gaps.max()))


if __name__ == "__main__":
    main()
