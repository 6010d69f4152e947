"""Variants of model types with other options: windows, chunks, sparse attention, scaled positions."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family

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
