"""Which models the embedded server takes, and how it refuses the others."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.types import SamplingParams
from tests.servers.tiny_embedded import GREEDY, SIZES, build, random_prompt, serving, tiny_model

REFUSED: dict[str, tuple[Any, str]] = {
    "sliding_window": (lambda: MistralConfig(**SIZES, sliding_window=32), "sliding window of 32 tokens"),
    "sliding_window_in_some_layers": (
        lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1),
        "sliding window of 32 tokens",
    ),
    "soft_capping": (
        lambda: Gemma2Config(**SIZES, head_dim=16, sliding_window=4096, query_pre_attn_scalar=16),
        "soft-capping",
    ),
    "attention_sinks": (
        lambda: GptOssConfig(**SIZES, head_dim=16, sliding_window=4096, num_local_experts=2),
        "attention sinks",
    ),
    "two_sets_of_frequencies": (
        lambda: Phi3Config(
            **SIZES,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
            original_max_position_embeddings=64,
        ),
        "longrope",
    ),
    "no_attention": (
        lambda: MambaConfig(vocab_size=199, hidden_size=32, num_hidden_layers=2),
        "use another server",
    ),
    "fixed_attention": (
        lambda: BloomConfig(vocab_size=199, hidden_size=32, n_layer=2, n_head=4),
        "use another server",
    ),
    "too_short": (lambda: Qwen2Config(**{**SIZES, "max_position_embeddings": 100}), "ends at 100 positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_engine_would_get_wrong_is_refused(name: str) -> None:
    make_config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        EmbeddedServer(build(make_config()), config=EmbeddedConfig(max_model_len=256))


def test_a_model_that_mixes_tokens_outside_attention_is_found_out_by_its_log_probs() -> None:
    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + output.roll(1, dims=1)
    )
    with pytest.raises(ConfigError, match="log-probs differ from a plain forward"):
        EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256))
    model(input_ids=torch.zeros((1, 3), dtype=torch.long))  # has its own attention again


def test_lengths_too_short_to_verify_with_are_named() -> None:
    with pytest.raises(
        ConfigError, match="is 14 tokens, too short to verify the model with; give at least 15"
    ):
        EmbeddedServer(tiny_model(), config=EmbeddedConfig(max_model_len=14))

    async def main() -> None:
        for settings in ({"max_model_len": 15}, {"max_model_len": 14, "verify": False}):
            async with serving(tiny_model(), **settings) as server:
                assert len((await server.generate(random_prompt(9), GREEDY, "a")).token_ids) >= 5

    asyncio.run(main())


def test_a_model_belongs_to_one_server_at_a_time() -> None:
    async def main() -> None:
        model = tiny_model()
        server = EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256))
        with pytest.raises(ConfigError, match="already belongs to an embedded server"):
            EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256))
        with pytest.raises(ConfigError, match="give the server its own copy"):
            model(input_ids=torch.zeros((1, 3), dtype=torch.long))
        await server.close()
        await EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256)).close()

    asyncio.run(main())


def test_serving_a_copy_leaves_the_original_alone() -> None:
    async def main() -> None:
        model = tiny_model()
        before = copy.deepcopy(model.state_dict())
        async with serving(model) as server:
            zeros = ((name, torch.zeros_like(value)) for name, value in before.items())
            await server.update_weights(zeros, weight_version=1)
            model(input_ids=torch.zeros((1, 3), dtype=torch.long))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])

    asyncio.run(main())


def test_a_saved_model_is_loaded_from_its_directory(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")

    async def main() -> None:
        config = EmbeddedConfig(max_model_len=256)
        server = EmbeddedServer.from_pretrained(tmp_path / "model", name="loaded", config=config)
        got = await server.generate(random_prompt(9), GREEDY, "a")
        await server.close()
        async with serving(model) as reference:
            assert got == await reference.generate(random_prompt(9), GREEDY, "a")

    asyncio.run(main())


def test_a_configuration_names_a_server_by_its_keys(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"), device="cpu")

    def create(**engine_kwargs: Any) -> EmbeddedServer:
        return EmbeddedServer.create(
            ServerSpec("embedded-3", model=model, max_model_len=64, seed=3, engine_kwargs=engine_kwargs)
        )

    async def main() -> None:
        server = create(max_slots=2)
        output = await server.generate(random_prompt(50), SamplingParams(), "a")
        assert len(output.token_ids) == 64 - 50
        await server.close()

    asyncio.run(main())
    with pytest.raises(ConfigError, match=r"'rollout\.engine_kwargs\.max_slotz'; did you mean 'max_slots'"):
        create(max_slotz=2)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model can be loaded from .*absent"):
        EmbeddedServer.from_pretrained(tmp_path / "absent")


def test_bfloat16_runs_and_stays_near_float32() -> None:
    async def main() -> None:
        model = tiny_model(initializer_range=0.05)
        params = SamplingParams(temperature=0, max_tokens=1)
        async with serving(model, dtype="bfloat16") as short, serving(model) as full:
            assert short.cache_bytes == full.cache_bytes // 2
            a = await short.generate(random_prompt(30), params, "a")
            b = await full.generate(random_prompt(30), params, "a")
        assert a.log_probs == pytest.approx(b.log_probs, abs=0.1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slots": 0}, "max_slots is 0; give at least 1"),
        ({"dtype": "float8"}, "dtype is 'float8'; give one of auto, float32, bfloat16"),
        ({"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddedConfig(**settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        EmbeddedServer(tiny_model(), config=EmbeddedConfig(max_model_len=256, device="cuda"))
