"""Time of a GRPO step (rollout and update), compared with TRL's `GRPOTrainer` and its tools.

    python benchmarks/bench_trl.py [--model FOLDER] [--quick] [--json FILE]

Both train the two-hop look-up of `examples/` on the CPU, with the same warm-started model and the same rows. A step has
16 prompts with 8 samples, temperature 1, up to 4 turns and 128 tokens, and 4 updates of 64 samples in float32, without
a reference model. TRL samples all samples of a step in one batch with `generate` of `transformers`, and runs the tools
of an `environment_factory`. Our engine has a slot for each sample, and an update computes shared prefixes of samples
once (`actor.share_prefixes`). On both sides, a malformed call ends the conversation. Neither side writes journals or
trajectories. The learning rate is so low that the policy does not change; the number of sampled tokens per step
confirms it.

`--model` takes the warm-started model of the word problems (the folder `model` that `examples.run word_problems`
writes), and trains adapters of rank 16 on them in bfloat16: 4 prompts with 8 samples, up to 3 turns, and one update,
computed in parts of 8 samples, on two cores alone.

The comparison is on one core and on two cores. On one core, both sides use one torch thread. On two cores, TRL uses a
second torch thread. Ours uses an engine in a separate process (`rollout.engine: embedded_process`) and trains with two
threads (`trainer.num_threads`). Rounds alternate, each in a new process. The first steps of a round
are warm-up and are not counted. The table shows medians of the other steps, and the CPU time of the whole training per
step, including all processes and threads. Needs the extra `trl`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from outcome import conclude
from overhead.processes import tree_cpu_seconds
from rich.console import Console
from rich.table import Table
from training_rounds import EXAMPLES, make_task_model, run_in_new_process, silence_libraries

from agent_loop.config import load_config
from agent_loop.errors import ToolError
from agent_loop.storage.metrics_file import METRICS_FILE
from agent_loop.tools.calculator import SCHEMA, calculate
from agent_loop.training.metrics import MODEL_TOKENS, REWARD_MEAN, STEP_SECONDS, read_metrics
from agent_loop.training.ppo_trainer import PPOTrainer
from examples.two_hop_lookup import task as two_hop_lookup
from examples.word_problems import task as word_problems

GROUP_SIZE = 8
RESPONSE_LENGTH = 128
LEARNING_RATE = 1e-9
LORA_RANK, LORA_ALPHA = 16, 32
TARGET = 0.5
ENGINES = {1: "embedded", 2: "embedded_process"}
"""Our engine by number of cores."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one round."""

    step_s: list[float]
    """Times of the steps after the warm-up."""
    cpu_s: float
    """CPU time of the whole training per step."""
    reward: float
    """Mean reward of the last step, which shows that both sides do the same work."""
    num_tokens: float
    """Sampled tokens per trajectory in the last step, which also shows that both sides do the same work."""


Runner = Callable[..., Measured]


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one side on a number of cores."""

    side: str
    cores: int
    step_s: float
    """Median time of a step."""
    cpu_s: float
    """CPU time per step, as the median of the rounds."""
    to_trl: float
    """Ratio of the time of a step to TRL's, as the median of the rounds."""
    reward: float
    num_tokens: float
    """Sampled tokens per trajectory."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Task, sizes and steps of both sides."""

    example: str
    cores: tuple[int, ...]
    """Numbers of cores to compare on."""
    num_prompts: int
    max_turns: int
    updates_per_step: int
    num_warm_up_steps: int
    num_steps: int
    """Measured steps of a round."""
    num_rounds: int
    is_pretrained: bool
    """Whether the model has a large vocabulary, and adapters are trained in bfloat16."""
    trl_options: Mapping[str, Any]

    @property
    def num_samples(self) -> int:
        return self.num_prompts * GROUP_SIZE

    @property
    def total_steps(self) -> int:
        return self.num_warm_up_steps + self.num_steps

    @property
    def task(self) -> Any:
        return word_problems if self.is_pretrained else two_hop_lookup


TINY = Workload(
    example="two_hop_lookup",
    cores=(1, 2),
    num_prompts=16,
    max_turns=4,
    updates_per_step=4,  # two epochs of two mini-batches
    num_warm_up_steps=4,
    num_steps=8,
    num_rounds=3,
    is_pretrained=False,
    trl_options={"per_device_train_batch_size": 64, "steps_per_generation": 2, "num_iterations": 2},
)
PRETRAINED = Workload(
    example="word_problems",
    cores=(2,),
    num_prompts=4,
    max_turns=3,
    updates_per_step=1,
    num_warm_up_steps=1,
    num_steps=3,
    num_rounds=2,
    is_pretrained=True,
    trl_options={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "bf16": True},
)


def calculator_docstring() -> str:
    """Return a docstring from which TRL makes the schema of our calculator, so that the prompts are equal."""
    function = SCHEMA["function"]
    example = function["parameters"]["properties"]["expression"]["description"]
    return f"{function['description']}\n\nArgs:\n    expression: {example}"


class ShelfEnvironment:
    """Tools of the example as a TRL environment. Its methods are the tools, and each sample has its own instance."""

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


class CalculatorEnvironment:
    """Calculator as a TRL environment."""

    def reset(self, **_: Any) -> None:
        pass

    def calculator(self, expression: str):  # a return type would be in the prompt
        try:
            return calculate(expression)
        except ToolError as error:
            return f"error: {error}"

    calculator.__doc__ = calculator_docstring()


def trl_reward(completions: list[Any], said: list[str], **_: Any) -> list[float]:
    """Return 1 for the right last turn, else 0, with the signature of a TRL reward function."""
    return [
        float(str(messages[-1].get("content")).strip() == right)
        for messages, right in zip(completions, said, strict=True)
    ]


def run_ours(model_path: Path, *, folder: Path, workload: Workload, num_cores: int) -> Measured:
    """Measure steps of `agent-loop train`, including the publishing of weights."""
    torch.set_num_threads(1)
    config = load_config(
        EXAMPLES / workload.example / "config.yaml",
        overrides=[
            f"model.path={model_path}",
            f"trainer.run_dir={folder}",
            f"trainer.total_steps={workload.total_steps}",
            f"data.train_batch_size={workload.num_prompts}",
            f"actor.lr={LEARNING_RATE}",
            "algorithm.drop_zero_variance_groups=false",
            "rollout.multi_turn.max_turn_tokens=null",
            "rollout.multi_turn.max_invalid_turns=0",
            f"rollout.engine={ENGINES[num_cores]}",
            f"trainer.num_threads={num_cores}",
            f"rollout.engine_kwargs.max_slots={workload.num_samples}",
            "rollout.journal=false",
            "trainer.keep_trajectories=0",
        ],
    )
    cpu_s = tree_cpu_seconds()
    asyncio.run(PPOTrainer(config, overwrite=True, console=Console(quiet=True)).fit())
    cpu_s = tree_cpu_seconds() - cpu_s
    metrics = list(read_metrics(folder / METRICS_FILE))
    return Measured(
        [step[STEP_SECONDS] for step in metrics[workload.num_warm_up_steps :]],
        cpu_s / workload.total_steps,
        reward=metrics[-1][REWARD_MEAN],
        num_tokens=metrics[-1][MODEL_TOKENS] / workload.num_samples,
    )


def run_trl(model_path: Path, *, folder: Path, workload: Workload, num_cores: int) -> Measured:
    """Measure steps of `GRPOTrainer`, each with one rollout and its updates."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_path, padding_side="left")
    tokenizer.response_template = gemma_template(qwen3_template) if workload.is_pretrained else qwen3_template
    clock = UpdateClock()
    torch.set_num_threads(num_cores)
    trainer = GRPOTrainer(
        str(model_path),
        reward_funcs=trl_reward,
        environment_factory=CalculatorEnvironment if workload.is_pretrained else ShelfEnvironment,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([trl_row(row, workload) for row in workload.task.train_rows()]),
        callbacks=[clock],
        peft_config=adapters() if workload.is_pretrained else None,
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            gradient_checkpointing=False,
            num_generations=GROUP_SIZE,
            max_steps=workload.total_steps * workload.updates_per_step,
            max_completion_length=RESPONSE_LENGTH,
            max_tool_calling_iterations=workload.max_turns - 1,
            model_init_kwargs={"dtype": "bfloat16" if workload.is_pretrained else "float32"},
            learning_rate=LEARNING_RATE,
            epsilon_high=0.28,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **{"bf16": False, **workload.trl_options},
        ),
    )
    cpu_s = tree_cpu_seconds()
    trainer.train()
    cpu_s = tree_cpu_seconds() - cpu_s
    last = [entry for entry in trainer.state.log_history if "reward" in entry][-1]
    ends = clock.times[:: workload.updates_per_step]
    return Measured(
        [end - start for start, end in pairwise(ends)][workload.num_warm_up_steps :],
        cpu_s / workload.total_steps,
        reward=last["reward"],
        num_tokens=last["completions/mean_length"],
    )


def trl_row(row: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Return a row with its tables as JSON text, because Arrow would add the keys of all rows to each row."""
    said = workload.task.ANSWER.format(row["answer" if workload.is_pretrained else "shelf"])
    tables = {name: tool["create_kwargs"]["table"] for name, tool in row.get("tools_kwargs", {}).items()}
    return {"prompt": row["prompt"], "tables": json.dumps(tables), "said": said}


def gemma_template(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template that parses the same turns between the marks of Gemma's turns."""
    content = {"close_pattern": r"<end_of_turn>\s*", "content": "text"}
    fields = {**template["fields"], "content": content}
    return {**template, "start_anchor": "<start_of_turn>model\n", "fields": fields}


def adapters() -> Any:
    """Return adapters for the same layers as ours."""
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        target_modules="all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


class UpdateClock(transformers.TrainerCallback):
    """Callback that records the start of the training and the end of each update."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


OURS = "agent-loop train"
SIDES: Mapping[Runner, str] = {run_ours: OURS, run_trl: "TRL GRPOTrainer, environment_factory"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round; the target is not enforced")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="train word problems with this warm-started model"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    console = Console(width=120)
    if importlib.util.find_spec("trl") is None:
        console.print('skipped: bench_trl needs TRL; run: pip install "agent-loop[trl]"')
        return
    silence_libraries()
    workload = PRETRAINED if options.model else TINY
    if options.quick:
        workload = replace(workload, num_rounds=1, num_steps=2)
    rounds: dict[tuple[Runner, int], list[Measured]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_path = options.model or folder / "model"
        if options.model is None:
            make_task_model(model_path, num_steps=300 if options.quick else 500)
        for _ in range(workload.num_rounds):
            for num_cores in workload.cores:
                for run in (run_ours, run_trl):
                    shutil.rmtree(folder / "run", ignore_errors=True)
                    measured = run_in_new_process(
                        run,
                        model_path,
                        folder=folder / "run",
                        workload=workload,
                        num_cores=num_cores,
                    )
                    rounds[run, num_cores].append(measured)
    found = results(rounds)
    print_results(found, workload=workload, console=console)
    missed = [
        f"{result.side}, cores: {result.cores}: {result.to_trl:.2f} of TRL's time, above {TARGET}"
        for result in found
        if result.side == OURS and result.to_trl > TARGET
    ]
    conclude(found, missed=missed, json_file=options.json, is_quick=options.quick)


def results(rounds: Mapping[tuple[Runner, int], Sequence[Measured]]) -> list[Result]:
    return [
        Result(
            side=SIDES[run],
            cores=num_cores,
            step_s=statistics.median(seconds for measured in each for seconds in measured.step_s),
            cpu_s=statistics.median(measured.cpu_s for measured in each),
            to_trl=statistics.median(
                statistics.median(mine.step_s) / statistics.median(peer.step_s)
                for mine, peer in zip(each, rounds[run_trl, num_cores], strict=True)
            ),
            reward=statistics.mean(measured.reward for measured in each),
            num_tokens=statistics.mean(measured.num_tokens for measured in each),
        )
        for (run, num_cores), each in rounds.items()
    ]


def print_results(results: Sequence[Result], *, workload: Workload, console: Console) -> None:
    samples = f"{workload.num_prompts} prompts with {GROUP_SIZE} samples"
    table = Table("", title=f"GRPO, {workload.example}, {samples}, seconds per step (median)")
    for column in ("cores", "step", "to TRL", "CPU", "mean reward", "tokens sampled per trajectory"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.side,
            str(result.cores),
            f"{result.step_s:.2f}",
            f"{result.to_trl:.2f}",
            f"{result.cpu_s:.2f}",
            f"{result.reward:.2f}",
            f"{result.num_tokens:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
