"""Options that single model types need in addition to tiny sizes, and types that cannot be built."""

from __future__ import annotations

from typing import Any

from tests.families.sizes import HEADS, HIDDEN, VOCAB_SIZE

HYBRID = ["linear_attention", "full_attention"]
BYTES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "initializer_range": 0.3,
}

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": LLAMA3},
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
    "cwm": {"rope_parameters": LLAMA3},
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
