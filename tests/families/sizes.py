"""Tiny sizes for the fields of any configuration of a causal language model."""

from __future__ import annotations

import re
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 96
MAX_POSITIONS = 512
HIDDEN = 32
HEADS = 4
HEAD_DIM = 8
PAD, BOS, EOS = 0, 1, 2
PLAIN_IDS = range(3, 80)
"""Token ids without a special meaning. The ids of padding, images and so on are outside of the range."""

FIELDS: dict[str, Any] = {
    "hidden_size|d_model|n_embd|emb_dim|embedding_size|attention_hidden_size|word_embed_proj_dim": HIDDEN,
    "input_embedding_size|output_embedding_size|lru_width|embedding_dim|d_kv_hidden": HIDDEN,
    "pronunciation_embed_dim|shape_embed_dim|router_hidden_size|prompt_mid_dim|ple_embed_dim": 16,
    "intermediate_size|.*_intermediate_size|intermediate_size_mlp|ffn_dim|dff|dim_ff|d_inner": 48,
    "encoder_ffn_dim|decoder_ffn_dim|ffn_hidden_size|expert_ffn_hidden_size|feed_forward_size": 48,
    "n_inner": None,
    "num_attention_heads|n_head|n_heads|attention_heads|.*coder_attention_heads|swa_num_attention_heads": HEADS,
    "num_encoder_attention_heads|num_decoder_attention_heads|num_heads": HEADS,
    "head_dim|dim_head|d_head|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|swa_head_dim|kv_channels": HEAD_DIM,
    "attention_head_dim|attention_head_size|index_head_dim|linear_head_dim|rotary_dim": HEAD_DIM,
    "linear_key_head_dim|linear_value_head_dim|mamba_d_head|mamba_head_dim|mamba_headdim": HEAD_DIM,
    "kv_lora_rank|q_lora_rank|o_lora_rank|gated_norm_rank|laurel_rank|adapter_rank|hc_lowrank|d_rel": 16,
    "linear_num_heads|linear_num_value_heads": HEADS,
    "mamba_n_heads|mamba_num_heads|n_mamba_heads": 8,
    "mamba_d_ssm": 64,
    "output_channels|mlp_dim|nemo_conv_channels|ext_pw_out_channel": HIDDEN,
    "mamba_d_state|state_size|ssm_state_size": 8,
    "mamba_dt_rank|time_step_rank": 4,
    "chunk_size|mamba_chunk_size|block_size": 16,
    "max_position_embeddings|n_positions|n_ctx|max_seq_len|max_.*_positions": MAX_POSITIONS,
    "model_max_length|context_length": MAX_POSITIONS,
    "num_experts|num_local_experts|n_routed_experts|moe_num_experts|.*_num_experts": 8,
    "vocab_size|.*_vocab_size|vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range|init_std|embed_init_std|initializer_factor|embedding_initializer_range": 0.3,
    ".*dropout(_prob|_p)?|(resid|embd|emb)_pdrop|.*layerdrop|router_jitter_noise|input_jitter_noise": 0.0,
    "use_cache|is_decoder": True,
    "logit_scale": 0.8,
    "logits_scaling|lm_head_multiplier": 1.25,
    "final_logit_softcapping|logits_soft_cap|output_logit_soft_cap": 10.0,
}
"""Values of fields, by a pattern of the field's name."""

CAPPED: dict[str, int] = {
    "num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k_experts": 2,
    "n_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups|o_groups": 2,
    "topk_group|.*n_shared_experts|.*num_shared_experts|first_k_dense_replace|num_dense_layers|zero_expert_num": 1,
    "hc_mult|hc_count|num_codebooks": 2,
    "index_n_heads": 16,
    "type_vocab_size|task_type_vocab_size|prompt_types|segment_types": 2,
    "swiglu_limit": 10,
}
"""Largest values of fields, by a pattern of the field's name. Smaller defaults are kept."""

WINDOWS = "sliding_window|sliding_window_size|attention_window_size|local_attention|window_size|attention_chunk_size"
LAYERS = "num_hidden_layers|n_layers?|num_layers|.*coder_layers|num_blocks|num_layers_per_stack"
KEY_HEADS = {
    "num_key_value_heads": ("num_attention_heads", HEADS),
    "swa_num_key_value_heads": ("swa_num_attention_heads", HEADS),
    "num_kv_heads": ("num_attention_heads", HEADS),
    "num_query_groups": ("num_attention_heads", HEADS),
    "linear_num_key_heads": ("linear_num_value_heads", HEADS),
}


def tiny_settings(config_class: Any, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return arguments that make a tiny configuration of `config_class`.

    Lists with one value per layer keep each distinct value, and keep their last value at the end. `changes` take
    precedence, and the longest list of strings in them sets the number of layers.
    """
    changes = changes or {}
    defaults = config_class().to_dict()
    known = {name: value for name, value in defaults.items() if not isinstance(value, dict)}
    settings = _layer_settings(known, changes)
    for name, default in known.items():
        if name in settings or name in changes:
            continue
        if isinstance(default, list):
            settings.update({name: EOS} if name == "eos_token_id" else {})
        elif _is(name, WINDOWS) and isinstance(default, int):
            settings[name] = MAX_POSITIONS
        elif name in KEY_HEADS:
            settings[name] = _key_heads(name, default, known)
        else:
            settings.update(_sized(name, default))
    parts = {
        name: _part(config_class.sub_configs[name], value)
        for name, value in defaults.items()
        if name in config_class.sub_configs
    }
    return {**settings, **{name: part for name, part in parts.items() if part is not None}, **changes}


def _layer_settings(known: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and the lists with one value per layer."""
    layers = next((value for name, value in known.items() if _is(name, LAYERS) and isinstance(value, int)), 0)
    patterns = {
        name: _pattern(value)
        for name, value in known.items()
        if name not in changes and isinstance(value, list) and len(value) == layers > 2 and _kinds(value)
    }
    given = [value for value in changes.values() if isinstance(value, list) and isinstance(value[0], str)]
    count = max([2, *map(len, given), *map(len, patterns.values())])
    numbers = {name: count for name in known if _is(name, LAYERS) and name not in changes}
    return {**numbers, **{name: _fit(pattern, count) for name, pattern in patterns.items()}}


def _part(config_class: Any, default: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of a nested configuration such as the text model, or None if it is missing by default."""
    if not default:
        return None
    if config_class is AutoConfig:
        config_class = CONFIG_MAPPING[default["model_type"]]
    return {**tiny_settings(config_class), "model_type": default.get("model_type")}


def _is(name: str, pattern: str) -> bool:
    return re.fullmatch(pattern, name) is not None


def _sized(name: str, default: Any) -> dict[str, Any]:
    for pattern, most in CAPPED.items():
        if _is(name, pattern):
            return {} if default is None else {name: min(default, most)}
    for pattern, size in FIELDS.items():
        if _is(name, pattern):
            unset = default is None and not _is(
                name, "(pad|bos|eos)_token_id|head_dim|final_logit_softcapping"
            )
            return {} if unset else {name: size}
    if re.search(r"_token_(id|index)$", name) and isinstance(default, int) and default >= VOCAB_SIZE:
        return {name: 80 + sum(map(ord, name)) % 16}
    return {}


def _key_heads(name: str, default: int | None, known: dict[str, Any]) -> int | None:
    of, heads = KEY_HEADS[name]
    if default in (None, 1):
        return default
    return heads if default == known.get(of) else heads // 2


def _kinds(values: list[Any]) -> bool:
    """Return whether a list has types or flags of layers instead of numbers or sizes."""
    return all(isinstance(value, str) or value in (0, 1) for value in values)


def _pattern(values: list[Any]) -> list[Any]:
    """Return the distinct values in the order of their first occurrence, but with the list's last value at the end."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct
    return [value for value in distinct if value != values[-1]] + [values[-1]]


def _fit(pattern: list[Any], count: int) -> list[Any]:
    """Repeat the pattern to get `count` values that end with the end of the pattern."""
    whole = pattern * (count // len(pattern) + 1)
    return whole[len(whole) - count :]
