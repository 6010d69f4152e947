"""`agent-loop check model`, as a shell runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_loop.checks import check_model
from agent_loop.cli import app
from tests.families.zoo import FAMILIES
from tests.servers.tiny_embedded import tiny_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_of_computing_a_known_model_passes(tmp_path: Path, dtype: str) -> None:
    tiny_model(initializer_range=0.06).save_pretrained(tmp_path / "model")
    command = ["check", "model", str(tmp_path / "model"), "--dtype", dtype, "--max-model-len", "128"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stdout
    assert "model 'Qwen3ForCausalLM': 7 passed, 0 failed, 0 skipped" in result.stdout


def test_ways_that_the_table_does_not_have_are_reported_and_do_not_fail() -> None:
    report = asyncio.run(check_model(FAMILIES["mamba"].build(), max_model_len=64))
    assert not report.failures
    skipped = {"cache=shared is exact", "share_prefixes is exact"}
    assert skipped <= set(report.named("skipped"))


def test_a_model_that_the_table_is_wrong_about_fails() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + output.roll(1, dims=1)
    )
    failed = asyncio.run(check_model(model, max_model_len=64)).named("failed")
    assert {"cache=shared is exact", "padded rows are exact"} <= set(failed)
