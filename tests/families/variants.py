"""Options of single model types that matter because of a limit: windows, chunks, sparse attention, scaled positions."""

from __future__ import annotations

from typing import Any

from tests.families.family import Family

LIMIT = 16
"""The tokens that a window spans, so that short tests get past it."""
SLIDING, FULL = "sliding_attention", "full_attention"
SHORT: dict[str, Any] = {"rope_theta": 10_000.0, "original_max_position_embeddings": LIMIT, "factor": 32.0}

WINDOWED = (
    *(
        "afmoe",
        "beam",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "cwm",
        "deepseek_v4",
        "dots3_note_text",
    ),
    *("exaone4", "exaone_moe", "flint", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss"),
    *("gemma4_unified_text", "granite_swa", "granitemoe_swa", "kolibri1", "lfm3", "mellum", "mimo_v2_flash"),
    *("ministral", "mistral", "mixtral", "moshi", "olmo3", "phi3", "phimoe", "starcoder2", "vaultgemma"),
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
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
ROPE_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                **SHORT,
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "qwen3-rope-yarn": ("qwen3", {"rope_parameters": {**SHORT, "rope_type": "yarn"}}),
    "deepseek_v3-rope-yarn": ("deepseek_v3", {"rope_parameters": {**SHORT, "rope_type": "yarn"}}),
    "phi3-rope-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": LIMIT,
            "rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 1.0},
        },
    ),
    "phimoe-rope-longrope": (
        "phimoe",
        {"rope_parameters": {**LONG_ROPE, "short_mscale": 1.1, "long_mscale": 1.2}},
    ),
    "qwen3-rope-longrope": ("qwen3", {"rope_parameters": {**LONG_ROPE, "factor": 32.0}}),
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 32.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 32.0}


def variants() -> list[Family]:
    """Return the variants; each has the weights of the model of its type where their shapes agree."""
    made = [Family(f"{kind}-window", kind, {"sliding_window": LIMIT}, (LIMIT,)) for kind in WINDOWED]
    made += [Family(f"{kind}-window", kind, options, (LIMIT,)) for kind, options in WINDOW_OPTIONS.items()]
    made += [Family(f"{kind}-sparse", kind, options, (8,)) for kind, options in SPARSE_OPTIONS.items()]
    made += [Family(name, kind, options, (LIMIT,)) for name, (kind, options) in ROPE_OPTIONS.items()]
    for kind in ("qwen3",):
        changes = {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}
        made.append(Family(f"{kind}-rope-dynamic", kind, changes, (LIMIT,)))
    made.append(Family("llama-rope-linear", "llama", {"rope_parameters": LINEAR}))
    made.append(Family("llama4_text-chunk", "llama4_text", {"attention_chunk_size": LIMIT}, (LIMIT,)))
    made.append(Family("llama4_text-temperature", "llama4_text", {"floor_scale": 8}, (8,)))
    made.append(Family("falcon-alibi", "falcon", {"alibi": True}))
    made.append(Family("gpt_bigcode-many-heads", "gpt_bigcode", {"multi_query": False}))
    return made
