"""Tiny models with random weights of every causal language model that transformers can build, and of variants.

`FAMILIES` lists them. Models that are named after their type have no window or similar limit below `MAX_POSITIONS`.
The variants have limits of 8 to 24 tokens.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

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


HYBRID = ["linear_attention", "full_attention"]
BYTES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "initializer_range": 0.3,
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": LLAMA3_ROPE},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "big_bird": {"attention_type": "original_full"},
    "blt": {
        "use_cache": False,
        "encoder_config": {**BYTES, "hidden_size_global": 64, "cross_attn_k": 2},
        "decoder_config": {**BYTES, "hidden_size_global": 64, "cross_attn_k": 2},
        "global_config": {**BYTES, "hidden_size": 64},
        "patcher_config": {**BYTES, "sliding_window": 512},
        "encoder_hash_byte_group_vocab": 64,
    },
    "cpmant": {"segment_types": 3, "prompt_types": 3, "prompt_length": 4},
    "cwm": {"rope_parameters": LLAMA3_ROPE},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots3_note": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "head_dim": 16,
        "per_layer_config": {1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8}},
    },
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {"layer_types": HYBRID},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None, "embedding_scale": None},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "minicpm3": {"scale_emb": 1, "dim_model_base": 32},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 512,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "w_init_variance_scale": 3.0},
    "reformer": {
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 512,
        "lsh_attn_chunk_length": 512,
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 16],
    },
    "rwkv": {"rescale_every": 0},
    "xlnet": {"attn_type": "uni"},
    "xlm": {"causal": True},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}
OVERRIDES["dots3_note_text"] = OVERRIDES["dots3_note"]
OVERRIDES["qwen4_exp_text"] = OVERRIDES["qwen4_exp"]

NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "it only drafts from the keys and values of another model",
    "gemma4_unified_assistant": "it only drafts from the keys and values of another model",
}

ROTATION_CHANGES = "sequences beyond the limit change the rotation of all positions"
NOT_CAUSAL: dict[str, str] = {
    "big_bird-sparse": "blocks attend to later blocks",
    "cpmant": "every token attends to the whole context",
    "doge-sparse": "the tokens to keep are chosen among all tokens, including later ones",
    "llama-rope-dynamic": ROTATION_CHANGES,
    "phi3-rope-longrope": ROTATION_CHANGES,
    "phimoe-rope-longrope": ROTATION_CHANGES,
    "prophetnet": "the buckets of its relative positions depend on the length of the sequence",
    "qwen3-rope-dynamic": ROTATION_CHANGES,
    "qwen3-rope-longrope": ROTATION_CHANGES,
}
"""Families whose logits at a position depend on later tokens, with the reason."""


NARROW, WIDE = 0.2, 0.3
"""Standard deviations of the output head's weights. Below `NARROW`, next-token distributions are flat and the weights
are drawn again with `WIDE`."""


@dataclass(frozen=True)
class Family:
    """Model type with one set of options, from which tiny models are built."""

    name: str
    """Model type, followed by the name of a variant: `qwen3`, `qwen3-window`."""
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the configuration in addition to the tiny sizes."""
    limits: tuple[int, ...] = ()
    """Lengths in tokens above which the computation changes: windows, chunks, original context lengths."""
    causal: bool = True
    """Whether the logits at a position do not depend on later tokens."""

    def build(self, seed: int = 0) -> Any:
        """Return a new model in float32 and evaluation mode. Its weights depend only on the seed and the family."""
        config = self.config()
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(seed)
            model = self._model_class()(config).eval()
            head = model.get_output_embeddings()
            if isinstance(head, torch.nn.Linear) and head.weight.std() < NARROW:
                torch.nn.init.normal_(head.weight, std=WIDE)
            _fill_padding(model)
            return model

    def config(self) -> Any:
        """Return a new configuration. It is that of the text model for a composite type whose model class takes it."""
        config_class = CONFIG_MAPPING[self.model_type]
        model_config_class = self._model_class().config_class
        if config_class.sub_configs and not issubclass(config_class, model_config_class):
            config_class = model_config_class
        with _quiet():
            return config_class(**tiny_settings(config_class, copy.deepcopy(dict(self.changes))))

    def _model_class(self) -> Any:
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type])


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of transformers about tiny sizes and default configurations."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _fill_padding(model: Any) -> None:
    """Initialize the embedding of the padding token like the others, as in models that were trained on it.

    Keys of zeros would have equal scores in sparse attention, and torch's choice among them depends on the length of
    the sequence.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            torch.nn.init.normal_(module.weight.data[module.padding_idx], std=module.weight.std().item())


LIMIT = 16
"""Length of windows in tokens, short enough that the sequences of the tests exceed it."""
SLIDING, FULL = "sliding_attention", "full_attention"

WINDOWED = (
    *("afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "deepseek_v4"),
    *("dots3_note_text", "exaone4", "exaone_moe", "flint", "gemma2", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "gemma4_unified_text", "gpt_oss", "granite_swa", "granitemoe_swa", "kolibri1"),
    *("lfm3", "mellum", "mimo_v2_flash", "ministral", "mistral", "mixtral", "olmo3", "phi3", "phimoe"),
    *("starcoder2", "vaultgemma"),
)
"""Model types that only need a value for `sliding_window`."""

WINDOW_OPTIONS: dict[str, dict[str, Any]] = {
    "dots1": {"sliding_window": LIMIT, "layer_types": [SLIDING, FULL]},
    "gpt_neo": {"window_size": LIMIT},
    "inkling2_text": {"sliding_window_size": LIMIT},
    "inkling_text": {"sliding_window_size": LIMIT},
    "laguna": {"sliding_window": LIMIT, "layer_types": [SLIDING, FULL]},
    "modernbert-decoder": {"sliding_window": LIMIT},
    "qwen2": {"sliding_window": LIMIT, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
    "qwen2_moe": {"sliding_window": LIMIT, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
    "qwen3": {"sliding_window": LIMIT, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
    "qwen3_moe": {"sliding_window": LIMIT, "use_sliding_window": True},
    "recurrent_gemma": {"attention_window_size": LIMIT},
    "smollm3": {"sliding_window": LIMIT, "use_sliding_window": True, "layer_types": [SLIDING, FULL]},
    "zaya": {"sliding_window": LIMIT, "layer_types": ["hybrid_sliding", "hybrid"]},
}

SPARSE_OPTIONS: dict[str, dict[str, Any]] = {
    "axk2": {"index_topk": 8},
    "deepseek_v32": {"index_topk": 8},
    "deepseek_v4": {"index_topk": 2},
    "dots3_note_text": {"index_topk": 8},
    "glm_moe_dsa": {"index_topk": 8},
    "hy_v4": {"index_topk": 8},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "qwen4_exp_text": {"indexer_budget": 8},
}

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
SCALED: dict[str, Any] = {"rope_theta": 10_000.0, "original_max_position_embeddings": LIMIT, "factor": 32.0}
YARN = {"rope_parameters": {**SCALED, "rope_type": "yarn"}}
LLAMA3 = {
    "rope_parameters": {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
OVER_LENGTH = {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}
LONG_ROPE_OPTIONS: dict[str, dict[str, Any]] = {
    "phi3": {
        "original_max_position_embeddings": LIMIT,
        "rope_parameters": {**LONG_ROPE, "attention_factor": 1.0, "partial_rotary_factor": 1.0},
    },
    "phimoe": {
        "rope_parameters": {**LONG_ROPE, "rope_theta": 1_000_000.0, "short_mscale": 1.0, "long_mscale": 1.2}
    },
    "qwen3": {"rope_parameters": {**LONG_ROPE, "attention_factor": 1.0, "factor": 32.0}},
}

OTHERS = (
    Family(
        "big_bird-sparse",
        "big_bird",
        {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
        (24,),
    ),
    Family("deepseek_v3-rope-yarn", "deepseek_v3", YARN),
    Family("doge-sparse", "doge", {"keep_window_size": 8}, (8,)),
    Family("falcon-alibi", "falcon", {"alibi": True}),
    Family("falcon-grouped", "falcon", {"new_decoder_architecture": True}),
    Family("gpt2-dropout", "gpt2", {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}),
    Family("gpt_bigcode-many-heads", "gpt_bigcode", {"multi_query": False}),
    Family("gpt_oss-rope-yarn", "gpt_oss", YARN),
    Family("granitemoehybrid-rope", "granitemoehybrid", {"position_embedding_type": "rope"}),
    Family("inkling_text-scaling", "inkling_text", {"log_scaling_n_floor": 8}, (8,)),
    Family("llama-rope-linear", "llama", LINEAR),
    Family("llama-rope-llama3", "llama", LLAMA3),
    Family("llama4_text-chunk", "llama4_text", {"attention_chunk_size": LIMIT}, (LIMIT,)),
    Family("llama4_text-temperature", "llama4_text", {"floor_scale": 8}, (7,)),
    Family("moshi-window", "moshi", {"sliding_window": LIMIT}),
    Family("qwen3-rope-yarn", "qwen3", YARN),
    Family(
        "reformer-chunk",
        "reformer",
        {"local_attn_chunk_length": LIMIT, "lsh_attn_chunk_length": LIMIT},
        (LIMIT,),
    ),
    Family(
        "zamba2-rope",
        "zamba2",
        {"use_mem_rope": True, "num_mem_blocks": 2, "use_shared_attention_adapter": True},
    ),
)
"""The other variants. The window of Moshi has no effect, because its masks leave the window to flash attention."""


def variants() -> list[Family]:
    """Return the variants. A variant has the weights of its type's model if their shapes are equal."""
    windows = {**{kind: {"sliding_window": LIMIT} for kind in WINDOWED}, **WINDOW_OPTIONS}
    return [
        *(Family(f"{kind}-window", kind, options, (LIMIT,)) for kind, options in windows.items()),
        *(Family(f"{kind}-sparse", kind, options, (8,)) for kind, options in SPARSE_OPTIONS.items()),
        *(
            Family(f"{kind}-rope-longrope", kind, options, (LIMIT,))
            for kind, options in LONG_ROPE_OPTIONS.items()
        ),
        *(Family(f"{kind}-rope-dynamic", kind, OVER_LENGTH, (LIMIT,)) for kind in ("qwen3", "llama")),
        *OTHERS,
    ]


def _families() -> dict[str, Family]:
    known = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in NOT_BUILT]
    plain = [Family(kind, kind, OVERRIDES.get(kind, {})) for kind in known]
    varied = [
        replace(family, changes={**OVERRIDES.get(family.model_type, {}), **family.changes})
        for family in variants()
        if family.model_type in known
    ]
    return {
        family.name: replace(
            family, causal=family.name not in NOT_CAUSAL and family.model_type not in NOT_CAUSAL
        )
        for family in (*plain, *varied)
    }


FAMILIES: dict[str, Family] = _families()
"""All families by name: the types in the order of transformers, then the variants."""


def each_family(*names: str, where: Callable[[Family], bool] = lambda family: True) -> Any:
    """Parametrize a test over `family`: the named families, or all of them, filtered by `where`."""
    selected = [FAMILIES[name] for name in names or FAMILIES]
    return pytest.mark.parametrize("family", [pytest.param(f, id=f.name) for f in selected if where(f)])


def token_ids(length: int, *, seed: int = 0) -> list[int]:
    """Return random ids of plain tokens, which are not tokens for padding, end or images."""
    return random.Random(seed).choices(PLAIN_IDS, k=length)
