"""Command that converts the published GSM8K files to rows for training.

    python -m examples.gsm8k.preprocess train.jsonl --out data/gsm8k/train.parquet

The source is JSON lines or Parquet with `question` and `answer`; an answer ends in `#### 42`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agent_loop.errors import AgentLoopError, DataError
from agent_loop.integrations.verl.gsm8k import MARK, read_answer

SYSTEM = (
    "You solve math problems. Work the answer out step by step, check it with the tool `calc_gsm8k_reward`, and try "
    "again if it is wrong. Then write the final answer after `####`, as in `#### 42`."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.gsm8k.preprocess", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", type=Path, help=".jsonl or .parquet with the columns question and answer")
    parser.add_argument("--out", type=Path, required=True, help="the .parquet file to write")
    parser.add_argument(
        "--split", default="train", help="name of the split, recorded in each row (default: train)"
    )
    options = parser.parse_args(arguments)
    try:
        rows = [to_row(record, split=options.split, index=n) for n, record in enumerate(read(options.source))]
    except AgentLoopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), options.out)
    print(f"wrote {len(rows)} rows to {options.out}")
    return 0


def read(source: Path) -> list[dict[str, Any]]:
    """Return the records of a file.

    Raises:
        DataError: The file does not exist or cannot be parsed.
    """
    if not source.is_file():
        raise DataError(f"{source} does not exist; give a .jsonl or .parquet file of GSM8K")
    try:
        if source.suffix == ".parquet":
            return pq.read_table(source).to_pylist()
        return [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (ValueError, pa.ArrowException) as error:
        raise DataError(f"{source} cannot be read: {error}") from error


def to_row(record: dict[str, Any], *, split: str, index: int) -> dict[str, Any]:
    """Return a problem as a row. The tool and the interaction receive the right answer, the model does not.

    Raises:
        DataError: The record has no question, or its answer has no number at the end.
    """
    question, solution = record.get("question"), str(record.get("answer", ""))
    ground_truth = read_answer(solution)
    if not question or ground_truth is None:
        raise DataError(
            f"record {index} has the keys {sorted(record)} and no valid question and answer; provide a question, and "
            f"an answer that ends with {MARK} and a number"
        )
    truth = f"{ground_truth:f}"
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
        "interaction_kwargs": {"name": "gsm8k", "query": question, "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
    }


if __name__ == "__main__":
    sys.exit(main())
