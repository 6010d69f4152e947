"""Tests of the models that the embedded server supports, and of the errors for the others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    MambaConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen3ForCausalLM,
)

from agent_loop.config import ModelConfig, RolloutConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.server import embedded_config
from agent_loop.servers.factory import make_server_specs
from agent_loop.types import SamplingParams
from tests.servers.tiny_embedded import (
    GREEDY,
    SIZES,
    VOCAB_SIZE,
    assert_exact,
    build,
    joined,
    random_prompt,
    serving,
    tiny_model,
)

WINDOW = 32
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
}
MIXTURE: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
SLOWER: dict[str, tuple[Any, str]] = {
    "sliding_window_in_the_mask_alone": (
        lambda: PhimoeConfig(**SIZES, **MIXTURE, sliding_window=WINDOW),
        "sliding window of 32 tokens",
    ),
    "soft_capping": (
        lambda: Gemma2Config(**SIZES, head_dim=16, sliding_window=4096, query_pre_attn_scalar=16),
        "type gemma2 is not proved",
    ),
    "no_attention": (
        lambda: MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2),
        "is not proved",
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "two_sets_of_frequencies": (lambda: Phi3Config(**SIZES, **LONGROPE), "longrope"),
    "too_short": (lambda: Qwen2Config(**{**SIZES, "max_position_embeddings": 100}), "has 100 positions"),
}


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("name", SLOWER)
async def test_a_model_that_the_shared_cache_does_not_support_is_exact_with_a_cache_per_request(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_config, reason = SLOWER[name]

    model = build(make_config())
    async with serving(model) as server:
        assert server.cache_kind == "per_request"
        prompt, params = random_prompt(20), SamplingParams(max_tokens=40, seed=1)
        first = await server.generate(prompt, params, "a")
        second_prompt = joined(prompt, first.token_ids, random_prompt(5, seed=1))
        second = await server.generate(second_prompt, params, "a")
    assert_exact(prompt, first, model=model)
    assert_exact(second_prompt, second, model=model)
    [message] = [record.message for record in caplog.records if record.name.startswith("agent_loop.")]
    assert re.search(rf"runs one request at a time .*{reason}", message)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_a_trainer_could_not_reproduce_is_rejected(name: str) -> None:
    make_config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        EmbeddedServer(build(make_config()), config=EmbeddedConfig(max_model_len=256))


async def test_the_kind_of_cache_can_be_configured() -> None:
    prompt, params = random_prompt(30), SamplingParams(max_tokens=12, seed=3)
    completions: list[list[int]] = []
    for cache in ("shared", "per_request", "none"):
        async with serving(cache=cache) as server:
            assert server.cache_kind == cache
            output = await server.generate(prompt, params, "a")
        assert_exact(prompt, output)
        completions.append(output.token_ids)
    assert completions[0] == completions[1] == completions[2]
    model = build(PhimoeConfig(**SIZES, **MIXTURE, sliding_window=WINDOW))
    with pytest.raises(ConfigError, match=r"not supported by .*window of 32 tokens.*use another server"):
        EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256, cache="shared"))


class OwnModel(Qwen3ForCausalLM):
    """Model of a known type whose forward is not that of `transformers`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


async def test_a_model_outside_of_the_table_is_computed_without_a_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = OwnModel(tiny_model().config).eval()
    async with serving(model, max_model_len=64) as server:
        assert server.cache_kind == "none"
        prompt = random_prompt(9)
        output = await server.generate(prompt, SamplingParams(max_tokens=4, seed=1), "a")
    assert_exact(prompt, output, model=model)
    assert "the type qwen3 is not proved for a shared cache" in caplog.text


async def test_a_turn_resumes_the_cache_of_its_session() -> None:
    async with serving(cache="per_request") as server:
        prompt = random_prompt(30)
        first = await server.generate(prompt, GREEDY, "a")
        assert first.num_cached_tokens == 0
        longer = joined(prompt, first.token_ids, [5, 6])
        assert (await server.generate(longer, GREEDY, "b")).num_cached_tokens == 0
        # The last sampled token has never been computed.
        assert (await server.generate(longer, GREEDY, "a")).num_cached_tokens == len(longer) - 3
        server.end_session("a")
        assert (await server.generate(longer, GREEDY, "a")).num_cached_tokens == 0


async def test_a_model_belongs_to_one_server_at_a_time() -> None:
    model = tiny_model()
    server = EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256))
    with pytest.raises(ConfigError, match="already belongs to an embedded server"):
        EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256))
    with pytest.raises(ConfigError, match="give the server its own copy"):
        model(input_ids=torch.zeros((1, 3), dtype=torch.long))
    await server.close()
    await EmbeddedServer(model, config=EmbeddedConfig(max_model_len=256)).close()


async def test_a_server_is_created_from_a_server_spec(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"), device="cpu")

    def create(**engine_kwargs: Any) -> EmbeddedServer:
        return EmbeddedServer.create(
            ServerSpec("embedded-3", model=model, max_model_len=64, seed=3, engine_kwargs=engine_kwargs)
        )

    server = create(max_slots=2)
    output = await server.generate(random_prompt(50), SamplingParams(), "a")
    assert len(output.token_ids) == 64 - 50
    await server.close()
    with pytest.raises(ConfigError, match=r"'rollout\.engine_kwargs\.max_slotz'; did you mean 'max_slots'"):
        create(max_slotz=2)


def test_a_deterministic_rollout_has_deterministic_engines() -> None:
    for is_deterministic in (True, False):
        rollout = RolloutConfig(deterministic=is_deterministic, num_servers=2)
        specs = make_server_specs(ModelConfig(), rollout=rollout)
        assert [embedded_config(spec).deterministic for spec in specs] == [is_deterministic] * 2
    rollout = RolloutConfig(deterministic=True)
    (spec,) = make_server_specs(ModelConfig(), rollout=rollout)
    spec = replace(spec, engine_kwargs={"deterministic": False})
    with pytest.raises(ConfigError, match=r"deterministic is False, but rollout\.deterministic"):
        embedded_config(spec)


async def test_bfloat16_logprobs_are_close_to_float32() -> None:
    model = tiny_model(initializer_range=0.05)
    params = SamplingParams(temperature=0, max_tokens=1)
    async with serving(model, dtype="bfloat16") as short, serving(model) as full:
        assert short.cache_bytes == full.cache_bytes // 2
        a = await short.generate(random_prompt(30), params, "a")
        b = await full.generate(random_prompt(30), params, "a")
    assert a.log_probs == pytest.approx(b.log_probs, abs=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slots": 0}, "max_slots is 0; give at least 1"),
        ({"deterministic": True, "cache": "shared"}, "depends on the order of the requests"),
    ],
)
def test_settings_out_of_range_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddedConfig(**settings)
