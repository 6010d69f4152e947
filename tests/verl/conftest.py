from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.project import save_model

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    return save_model(tmp_path_factory.mktemp("verl"))


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows in the form of verl's GSM8K preprocessing, and return the file."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n} plus {n}? Write the answer after ####."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {
                "split": "train",
                "index": n,
                "answer": f"#### {2 * n}",
                "question": f"{n} plus {n}?",
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(2 * n)}}},
                "interaction_kwargs": {"query": f"{n} plus {n}?", "ground_truth": str(2 * n)},
            },
        }
        for n in range(4)
    ]
    file = tmp_path_factory.mktemp("data") / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file
