"""A training step, rollout and update, of our GRPO against TRL's `GRPOTrainer` with its own tools.

    python benchmarks/bench_trl.py [--quick]

Both train the two-hop look-up of `examples/` on the CPU with one thread: the same warm-started model, the same rows,
16 prompts with 8 samples, temperature 1, up to 4 turns and 128 tokens, and 4 updates of 64 samples. TRL samples with
the `generate` of `transformers`, all 128 samples in one batch, and runs the tools of an `environment_factory`. Neither
keeps a journal. The learning rate is so low that both sample from the same policy from the first step to the last.
Rounds take turns, the first step of each is left out, and the table shows medians. Needs the extra `trl`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))  # where examples/ is

from agent_loop.config import load_config
from agent_loop.training.metrics import REWARD_MEAN, STEP_SECONDS, read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run_folder import METRICS_FILE
from examples.common.demonstrations import Habit, demonstrations
from examples.common.model import make_model
from examples.common.tokenizer import pad_id, train_tokenizer
from examples.common.warm_start import encode, warm_start
from examples.run import tool_schemas
from examples.two_hop_lookup import task

TASK_CONFIG = "examples/two_hop_lookup/config.yaml"
NUM_PROMPTS = 16
GROUP_SIZE = 8
UPDATES_PER_STEP = 4
"""Two epochs of two mini-batches."""
MAX_TURNS = 4
RESPONSE_LENGTH = 128
LEARNING_RATE = 1e-9
TARGET = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """One round."""

    step_s: list[float]
    reward: float
    """Mean of the last step: that both do the same work."""


class Shelves:
    """TRL's form of the example's tools: one per sample, its methods are the tools."""

    def reset(self, *, tables: str, **_: Any) -> None:
        self._tables = json.loads(tables)

    def part_of_order(self, order: int) -> str:
        """Tells which part an order is about.

        Args:
            order: The number of the order.
        """
        return self._find("part_of_order", order)

    def shelf_of_part(self, part: int) -> str:
        """Tells which shelf holds a part.

        Args:
            part: The number of the part.
        """
        return self._find("shelf_of_part", part)

    def _find(self, table: str, number: int) -> str:
        found = self._tables[table].get(str(number))
        return "There is no such number." if found is None else str(found)


def earned(completions: list[Any], shelf: list[int], **_: Any) -> list[float]:
    """The example's reward, as TRL calls it."""
    return [
        float(str(messages[-1].get("content")).strip() == task.ANSWER.format(number))
        for messages, number in zip(completions, shelf, strict=True)
    ]


def make_warm_model(path: Path, *, num_steps: int) -> None:
    """A model that mostly calls both tools, as it does for most of a training."""
    tools = tool_schemas(task, load_config(TASK_CONFIG))
    conversations = demonstrations(task, rng=random.Random(0), habit=Habit(first_step_share=0.9))
    tokenizer = train_tokenizer(islice(conversations, 2000), tools=tools)
    model = make_model(tokenizer, seed=0)
    examples = encode(conversations, tokenizer=tokenizer, tools=tools)
    for _ in warm_start(model, examples=examples, pad_id=pad_id(tokenizer), num_steps=num_steps):
        pass
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def run_ours(model_path: Path, *, folder: Path, num_steps: int) -> Measured:
    """Steps of `agent-loop train`, the journal and the publishing of weights included."""
    config = load_config(
        TASK_CONFIG,
        overrides=[
            f"model.path={model_path}",
            f"trainer.run_dir={folder}",
            f"trainer.total_steps={num_steps}",
            f"actor.lr={LEARNING_RATE}",
            "algorithm.drop_zero_variance_groups=false",
            "rollout.multi_turn.max_turn_tokens=null",
            f"rollout.engine_kwargs.max_slots={NUM_PROMPTS * GROUP_SIZE}",
            "rollout.journal=false",
        ],
    )
    asyncio.run(PPOTrainer(config, overwrite=True, console=Console(quiet=True)).fit())
    metrics = list(read_metrics(folder / METRICS_FILE))
    return Measured([step[STEP_SECONDS] for step in metrics], metrics[-1][REWARD_MEAN])


def run_trl(model_path: Path, *, folder: Path, num_steps: int) -> Measured:
    """Steps of `GRPOTrainer`: one rollout and its updates each."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_path, padding_side="left")
    tokenizer.response_template = qwen3_template
    clock = UpdateClock()
    trainer = GRPOTrainer(
        str(model_path),
        reward_funcs=earned,
        environment_factory=Shelves,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([trl_row(row) for row in task.train_rows()]),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            num_generations=GROUP_SIZE,
            per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE // 2,
            steps_per_generation=2,
            num_iterations=2,
            max_steps=num_steps * UPDATES_PER_STEP,
            max_completion_length=RESPONSE_LENGTH,
            max_tool_calling_iterations=MAX_TURNS - 1,
            learning_rate=LEARNING_RATE,
            epsilon_high=0.28,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    ends = clock.times[::UPDATES_PER_STEP]
    return Measured([end - start for start, end in pairwise(ends)], rewards[-1])


def trl_row(row: dict[str, Any]) -> dict[str, Any]:
    """The tables as text: Arrow would give each row the keys of all."""
    tables = {name: tool["create_kwargs"]["table"] for name, tool in row["tools_kwargs"].items()}
    return {"prompt": row["prompt"], "tables": json.dumps(tables), "shelf": row["shelf"]}


class UpdateClock(transformers.TrainerCallback):
    """When the training began, and when each update ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    console = Console(width=120)
    if importlib.util.find_spec("trl") is None:
        console.print('bench_trl needs TRL; skipped. To run it: pip install "agent-loop[trl]"')
        return
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    num_rounds, num_steps = (1, 3) if options.quick else (3, 6)
    ours, peers = list[Measured](), list[Measured]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_warm_model(folder / "model", num_steps=300 if options.quick else 500)
        for _ in range(num_rounds):
            ours.append(run_ours(folder / "model", folder=folder / "ours", num_steps=num_steps))
            peers.append(run_trl(folder / "model", folder=folder / "trl", num_steps=num_steps))
    ratio = report(ours, peers, console=console)
    if ratio > TARGET and not options.quick:
        console.print(
            f"above the aim of {TARGET}: rollouts this short cost little beside the updates, which are alike"
        )


def report(ours: list[Measured], peers: list[Measured], *, console: Console) -> float:
    """Prints the table, and returns the median of the rounds' ratios."""
    table = Table(title=f"GRPO, {NUM_PROMPTS} prompts with {GROUP_SIZE} samples, seconds per step (median)")
    for column in ("", "step", "mean reward"):
        table.add_column(column, justify="right")
    for name, rounds in (("agent-loop train", ours), ("TRL GRPOTrainer, environment_factory", peers)):
        step_s = statistics.median(second for each in rounds for second in each.step_s[1:])
        table.add_row(name, f"{step_s:.2f}", f"{statistics.mean(each.reward for each in rounds):.2f}")
    console.print(table)
    ratio = statistics.median(
        statistics.median(mine.step_s[1:]) / statistics.median(peer.step_s[1:])
        for mine, peer in zip(ours, peers, strict=True)
    )
    console.print(f"ratio of the step times, median of {len(ours)} rounds: {ratio:.2f}")
    return ratio


if __name__ == "__main__":
    main()
