"""Training of TRL's `AsyncGRPOTrainer` on the demo task, with the worker and weight transfer of this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.config import Config
from agent_loop.integrations.trl import AgentLoopRollouts
from examples.two_hop_lookup.task import train_rows
from tests.integrations.cpu_attention import CpuFlashAttention

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]
NUM_STEPS = 10


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the GPU kernel and the GPU speed that the trainer expects."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", CpuFlashAttention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


def test_ten_steps_run_on_samples_of_the_current_weights(
    task_config: Config, model_path: Path, tmp_path: Path
) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # late: takes seconds

    args = AsyncGRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=8,
        per_device_train_batch_size=32,
        token_budget=0,
        max_staleness=2,
        max_completion_length=128,
        learning_rate=1e-3,
        max_steps=NUM_STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    with AgentLoopRollouts(task_config) as rollouts:
        rows = train_rows()
        worker = rollouts.worker(rows, args=args)
        trainer = AsyncGRPOTrainer(
            model=str(model_path),
            args=args,
            train_dataset=rollouts.dataset(rows),
            rollout_worker=worker,
            weight_transfer=worker.weight_transfer,
        )
        trainer.train()

    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert trainer.state.global_step == NUM_STEPS
    assert worker.model_version == NUM_STEPS + 1
    assert len(logs) == NUM_STEPS
    assert all(0 <= entry["reward"] <= 1 for entry in logs)
    assert all(entry["sample/staleness_max"] <= 2 for entry in logs)
    assert max(entry["agent_loop/num_tool_calls"] for entry in logs) > 0.3
    # The first samples come from the trained weights, so the ratio differs from 1 only by rounding.
    assert logs[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert logs[0]["kl"] == pytest.approx(0.0, abs=1e-4)
