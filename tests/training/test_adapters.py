"""Low-rank adapters are trained and the weights below them are not; servers get a base and factors, or merged weights.

Servers get the weights of each expert, and of a base in 4 bits, as the trainer computes with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from agent_loop.config import ActorConfig, Config, ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.servers.embedded.weights import load_weights
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.training.adapters import merged_adapters, merged_parameters
from agent_loop.training.checkpoint import MODEL_FOLDER, Checkpoint
from agent_loop.training.export import export_model
from agent_loop.training.policy import load_policy, load_reference
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.receiver import WeightReceiver
from agent_loop.weights.sender import WeightSender
from tests.training.fakes import VOCABULARY, advantages_of, tiny_policy, tiny_tokenizer
from tests.weights.receiving import flat


def settings(folder: Path, **others: Any) -> ModelConfig:
    return ModelConfig(**{"path": str(folder), "device": "cpu", "lora_rank": 4, **others})


def make_actor(config: ModelConfig, *, path: Path | None = None) -> Actor:
    return Actor(load_policy(config, path=path, seed=3), config=ActorConfig(lr=1e-2))


def train(actor: Actor, batch: RolloutBatch, *, steps: int = 2) -> dict[str, float]:
    advantages_BR = advantages_of(batch)
    return [actor.update(batch, advantages_BR=advantages_BR) for _ in range(steps)][-1]


def parameters(actor: Actor) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in actor.weights()}


def adapted(actor: Actor) -> AdaptedWeights:
    weights = actor.weights()
    assert isinstance(weights, AdaptedWeights)
    return weights


def test_new_adapters_change_nothing_and_are_trained_alone(policy_folder: Path, batch: RolloutBatch) -> None:
    actor, before = make_actor(settings(policy_folder)), dict(tiny_policy().named_parameters())
    trained = {name for name, value in actor.model.named_parameters() if value.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    mask_BR = batch["response_mask"].bool()
    torch.testing.assert_close(actor.logprobs(batch)[mask_BR], batch["rollout_log_probs"][mask_BR])
    assert parameters(actor).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in actor.weights())
    metrics = train(actor, batch)
    assert metrics[names.OPTIMIZER_STEPS] == 1
    for name, value in actor.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(value, before[name.replace(".base_layer.", ".")])
            assert value.grad is None
    changed = {name for name, value in actor.weights() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}


def test_the_reference_is_the_policy_without_its_adapters(policy_folder: Path, batch: RolloutBatch) -> None:
    model_config, config = settings(policy_folder), Config()
    penalty = config.actor.model_copy(update={"kl_loss_coef": 0.1, "lr": 1e-2})
    config = config.model_copy(update={"model": model_config, "actor": penalty})
    policy = load_policy(model_config)
    assert load_reference(config, policy=policy) is policy
    plain = load_reference(config)
    assert plain is not None
    assert not any(".lora_" in name for name, _ in plain.named_parameters())
    shared = Actor(policy, config=penalty, reference=policy)
    separate = Actor(load_policy(model_config), config=penalty, reference=plain)
    found, expected = train(shared, batch), train(separate, batch)
    assert found == expected
    assert found[names.KL_LOSS] > 0
    rows = torch.arange(len(batch))
    references_BR = [actor.past_logprobs(batch, rows=rows).reference_BR for actor in (shared, separate)]
    assert references_BR[0] is not None
    assert references_BR[1] is not None
    assert torch.equal(references_BR[0], references_BR[1])
    assert not torch.equal(shared.logprobs(batch), references_BR[0])


def test_adapters_on_head_and_embeddings_reach_the_servers(batch: RolloutBatch, tmp_path: Path) -> None:
    untied = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{**tiny_policy().config.to_dict(), "tie_word_embeddings": False})
    )
    untied.save_pretrained(tmp_path / "base")
    model_config = settings(tmp_path / "base", target_modules=["lm_head", "embed_tokens", "q_proj"])
    first = make_actor(model_config)
    train(first, batch)
    first.save(tmp_path / "adapters")
    second = make_actor(model_config, path=tmp_path / "adapters")
    assert all((".lora_" in name) == value.requires_grad for name, value in second.model.named_parameters())
    base = load_policy(settings(tmp_path / "base", lora_rank=0))
    merged = merged_adapters(base, folder=tmp_path / "adapters")
    untied.load_state_dict(dict(first.weights()))
    expected = first.model(input_ids=batch["input_ids"]).logits
    for model in (second.model, merged, untied.eval()):
        torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("others", "what"),
    [
        ({"target_modules": ["nothing"]}, r"model\.target_modules is \['nothing'\]: Target"),
        ({"target_modules": ["q_proj", "lm_head"]}, "the weight of lm_head in .* leave 'lm_head' out of"),
        ({"target_modules": ["lm_head", "embed_tokens"]}, "embed_tokens in lm_head .* leave 'embed_tokens'"),
        ({"lora_rank": 8}, r"model\.lora_rank is 8, but the adapters in .* have 4; set model\.lora_rank=4"),
        ({"lora_rank": 0}, r"model\.lora_rank is 0, but .* holds adapters; set it to the value of the run"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    policy_folder: Path, tmp_path: Path, others: dict[str, Any], what: str
) -> None:
    load_policy(settings(policy_folder)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=what):
        load_policy(settings(policy_folder, **others), path=None if "target_modules" in others else tmp_path)


def test_a_checkpoint_without_adapters_is_refused_if_the_settings_have_adapters(policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_rank is 4, but .* holds no adapters"):
        load_policy(settings(policy_folder), path=policy_folder)


def assert_merged(weights: AdaptedWeights, model: Any) -> None:
    """Check that the weights equal the weights that `peft` merges."""
    expected = dict(merged_parameters(model))
    for name, tensor in weights:
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def test_the_base_is_not_trained_and_factors_are_current(policy_folder: Path, batch: RolloutBatch) -> None:
    actor = make_actor(settings(policy_folder, lora_alpha=8.0))
    first = adapted(actor)
    before = flat(first)
    train(actor, batch, steps=1)
    second = adapted(actor)
    assert second.base_id == first.base_id
    assert flat(second) != before == flat(first)
    assert_merged(second, actor.model)
    weight = actor.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert second.base["model.layers.0.mlp.up_proj.weight"].data_ptr() == weight.data_ptr()
    with WeightSender("shared_memory") as sender, sender.offer(second, weight_version=2) as handle:
        assert flat(WeightReceiver().receive(handle.to_json())) == flat(second)


GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 16}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("adapters", [["one"], ["one", "other"]])
def test_embeddings_transposed_layers_and_several_adapters_are_sent_as_factors(adapters: list[str]) -> None:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2_SIZES))
    options: dict[str, Any] = {"target_modules": ["c_attn", "wte"], "init_lora_weights": False}
    for name in adapters:
        lora = peft.LoraConfig(r=3, lora_alpha=7, fan_in_fan_out=True, **options)
        model.add_adapter(lora, adapter_name=name)
    model.set_adapter(adapters)
    weights = adapted(Actor(model, config=ActorConfig()))
    left_OR, right_RI = weights.factors["transformer.h.0.attn.c_attn.weight"]
    assert (left_OR.shape, right_RI.shape) == ((32, 3 * len(adapters)), (3 * len(adapters), 96))
    assert "transformer.wte.weight" in weights.factors
    assert_merged(weights, model)


def test_a_convolution_is_sent_merged() -> None:
    class Convolved(transformers.GPT2LMHeadModel):
        def __init__(self, config: transformers.GPT2Config) -> None:
            super().__init__(config)
            self.conv = nn.Conv1d(4, 4, 3)

    model = Convolved(transformers.GPT2Config(**GPT2_SIZES))
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["conv"], init_lora_weights=False))
    before = model.conv.base_layer.weight.detach().clone()
    weights = Actor(model, config=ActorConfig()).weights()
    assert not isinstance(weights, AdaptedWeights)
    assert not torch.equal(dict(weights)["conv.weight"], before)


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = tiny_policy().config.to_dict() | {"model_type": "qwen3_moe", "architectures": None}
    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("experts")
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes | experts)).save_pretrained(path)
    return path


@pytest.mark.parametrize("changes", [{"lora_rank": 0}, {"target_modules": ["q_proj", "v_proj"]}])
def test_published_weights_are_those_that_a_checkpoint_of_the_merged_model_has(
    experts_folder: Path, batch: RolloutBatch, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = settings(experts_folder, **changes)
    actor = make_actor(config)
    train(actor, batch, steps=1)
    published = dict(actor.weights())
    assert isinstance(actor.weights(), AdaptedWeights) == bool(config.lora_rank)
    assert published.keys() == load_file(experts_folder / "model.safetensors").keys()
    actor.save(tmp_path)
    again = dict(make_actor(config, path=tmp_path).weights())
    assert again.keys() == published.keys()
    for name, value in again.items():
        torch.testing.assert_close(value, published[name])
    if not config.lora_rank:
        saved = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(published[name], saved[name]) for name in saved)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.randint(3, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids).logits


def test_servers_and_an_export_of_a_quantized_base_compute_what_the_trainer_computes(
    batch: RolloutBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as on a CPU with AVX-512 BF16, which repacks the weights for inference and refuses the widths of this model
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    tiny_policy().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    config = settings(tmp_path / "base", base_bits=4)
    actor = make_actor(config)
    train(actor, batch, steps=1)
    assert sum(parameter.dtype == torch.uint8 for parameter in actor.model.parameters()) == 2 * 7
    server = tiny_policy(seed=1)
    load_weights(server, dict(adapted(actor)))
    torch.testing.assert_close(logits(server), logits(actor.model), atol=1e-5, rtol=0)
    assert (logits(tiny_policy()) - logits(actor.model)).abs().max() > 1e-3
    actor.save(tmp_path / MODEL_FOLDER)
    tiny_tokenizer().save_pretrained(tmp_path / MODEL_FOLDER)
    again = make_actor(config, path=tmp_path / MODEL_FOLDER)
    assert torch.equal(logits(again.model), logits(actor.model))
    checkpoint = Checkpoint(path=tmp_path, step=1, config={"model": config.model_dump()})
    export_model(checkpoint, tmp_path / "exported")
    exported: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    torch.testing.assert_close(logits(exported), logits(actor.model), atol=1e-5, rtol=0)
