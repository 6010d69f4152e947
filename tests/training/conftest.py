from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agent_loop.config import Config
from agent_loop.rollout.batch import RolloutBatch
from tests.training.fakes import sampled_batch, tiny_policy


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tiny_policy().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{n} {n + 1}"} for n in range(2, 12)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return Config.model_validate(
        {
            "data": {
                "train_files": [str(tmp_path / "rows.json")],
                "val_files": [str(tmp_path / "rows.json")],
                "val_max_rows": 3,
                "train_batch_size": 4,
            },
            "model": {"path": str(tmp_path / "model"), "device": "cpu"},
            "rollout": {"n": 4, "val": {"n": 2}},
            "actor": {"lr": 3e-3, "ppo_mini_batches": 2, "warmup_steps": 3},
            "trainer": {"total_steps": 4, "run_dir": str(tmp_path / "run"), "save_every": 2},
        }
    )


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    """Return four groups of six trajectories."""
    return sampled_batch()
