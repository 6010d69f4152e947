"""Supervised runs: they learn, evaluate, stop with a checkpoint, and resume to the same numbers."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
from agent_loop.training.run import TrainResult
from agent_loop.training.supervised.trainer import SupervisedTrainer
from tests.helpers import small_tokenizer, user


@pytest.fixture
def config(tmp_path: Path) -> Config:
    torch.manual_seed(0)
    tokenizer = small_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write_chats(tmp_path, num_chats=12)
    return Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model"), "device": "cpu"},
            "sft": {
                "files": [str(tmp_path / "chats.jsonl")],
                "val_files": [str(tmp_path / "chats.jsonl")],
                "batch_size": 4,
            },
            "actor": {"lr": 3e-3, "warmup_steps": 2},
            "trainer": {"total_steps": 6, "run_dir": str(tmp_path / "run"), "save_every": 2, "val_every": 3},
        }
    )


def write_chats(folder: Path, *, num_chats: int) -> None:
    lines = [
        json.dumps({"messages": [*user(f"{n}?"), {"role": "assistant", "content": f"{n} {n % 3}"}]})
        for n in range(num_chats)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines))


def changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def train(config: Config, *, output: io.StringIO | None = None, **options: Any) -> TrainResult:
    console = Console(file=output or io.StringIO(), width=400)
    return asyncio.run(SupervisedTrainer(config, console=console, **options).fit())


def losses(result: TrainResult) -> list[float]:
    return [line[names.SFT_LOSS] for line in read_metrics(result.run_dir / "metrics.jsonl")]


def weights_of(result: TrainResult) -> dict[str, torch.Tensor]:
    assert result.checkpoint is not None
    return AutoModelForCausalLM.from_pretrained(result.checkpoint / "model", dtype="float32").state_dict()


def test_a_run_lowers_its_loss_on_both_splits(config: Config) -> None:
    result = train(changed(config, "trainer", total_steps=30, val_every=10, save_every=None))

    lines = list(read_metrics(result.run_dir / "metrics.jsonl"))
    assert lines[0][names.SFT_LOSS] == pytest.approx(math.log(len(small_tokenizer())), rel=0.05)
    assert lines[-1][names.SFT_LOSS] < 0.7 * lines[0][names.SFT_LOSS]
    assert [line["step"] for line in lines if names.SFT_VALIDATION_LOSS in line] == [10, 20, 30]
    assert lines[29][names.SFT_VALIDATION_LOSS] < lines[9][names.SFT_VALIDATION_LOSS]
    assert result.checkpoint is None


def test_the_loss_is_the_cross_entropy_of_transformers_on_the_same_tokens(config: Config) -> None:
    tokenizer = small_tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(config.model.path)
    total, count, num_tokens = 0.0, 0, 0
    for line in Path(config.sft.files[0]).read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(messages, return_dict=False)[
            :-1
        ]  # without the line break at the end
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total += float(loss) * (len(ids) - len(prompt))
        count += len(ids) - len(prompt)
        num_tokens += len(ids)

    result = train(changed(changed(config, "sft", batch_size=12), "trainer", total_steps=1, val_every=None))

    assert losses(result)[0] == pytest.approx(total / count, abs=1e-5)
    assert result.metrics[names.SFT_TOKENS] == count
    seconds = result.metrics[f"{names.SECONDS}update"]
    assert result.metrics[names.TOKENS_PER_SECOND] * seconds == pytest.approx(num_tokens)


def test_four_steps_and_two_more_after_a_resume_are_six_steps_bit_for_bit(
    config: Config, tmp_path: Path
) -> None:
    whole = train(config)
    half = changed(config, "trainer", total_steps=4, run_dir=str(tmp_path / "half"))
    train(half)

    resumed = train(changed(half, "trainer", total_steps=6), resume=True)

    assert losses(resumed) == losses(whole)
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(resumed).items())


def test_epochs_set_the_number_of_steps(config: Config) -> None:
    assert train(changed(config, "sft", epochs=1.5)).step == 5


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("sft", {"files": []}, "sft.files is empty"),
        ("sft", {"val_files": []}, "validation is switched on but sft.val_files is empty"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    config: Config, section: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(changed(config, section, **values))
