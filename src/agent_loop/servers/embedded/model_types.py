"""Table of model types: what the engine and the trainer may do with a type without changing its log-probs.

The tests of model families prove the table on a tiny model of every causal type of `transformers`. Types that are not
in the table take the plain path, which is right by construction: the engine computes the whole sequence for each token,
and the trainer computes each row alone and all logits at once. `agent-loop check model` compares the faster ways with
the plain path for one model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast

ProvedCache: TypeAlias = Literal["shared", "turns", "completions", "none"]
"""Fastest cache that gives the log-probs of a plain forward: one KV cache for all requests, or the model's own cache,
kept from turn to turn or for one completion, or none."""


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


SHARED_CACHE = _types(
    """
    afmoe apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3 doge dots1 electra emu3 ernie ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma3 gemma3_text gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode
    gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    idefics3 internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum minicpm3 minimax_m2
    ministral ministral3 mistral mixtral mllama modernbert-decoder moss_transcribe_diarize nanochat olmo
    olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3
    qwen3_moe roc_bert seed_oss smollm3 smolvlm solar_open starcoder2 youtu
    """
)
"""Types whose requests are computed together."""

_WINDOW_IN_MASK = _types("phimoe qwen2_moe")
"""Types of `SHARED_CACHE` that hide the tokens before a window by a mask, which the engine's attention does not get."""

CACHE_OF_TURNS = _types(
    """
    axk2 bailing_hybrid bart big_bird bigbird_pegasus blenderbot blenderbot-small bloom codegen deepseek_v32
    deepseek_v4 diffllama dots3_note dots3_note_text falcon falcon_h1 flint gemma2 git glm_moe_dsa gpt_neo
    gpt_neox_japanese gpt_oss gptj granite_swa granitemoe_swa granitemoehybrid hrm_text hy_v4 inkling2_text
    inkling_text kimi_linear lfm2 lfm2_moe lfm3 llama4 llama4_text mamba2 marian mbart megatron-bert
    mimo_v2_flash minimax minimax_m3_vl_text mpt mvp nemotron olmo_hybrid pegasus plbart qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text rembert roformer rwkv stablelm trocr
    vaultgemma whisper xglm xlstm zaya
    """
)
"""Types whose own cache can be resumed by the next turn."""

CACHE_OF_COMPLETIONS = _types("falcon_mamba jamba mamba zamba")
"""Types whose own cache is exact for one completion, but not if a later turn resumes it."""

NO_CACHE = _types(
    """
    bamba blt camembert data2vec-text moshi nemotron_h openai-gpt recurrent_gemma reformer roberta
    roberta-prelayernorm xlm-roberta xlm-roberta-xl xlnet xmod zamba2
    """
)
"""Types without a cache that gives the log-probs of a plain forward."""

_LATER_TOKENS = (
    "its log-probs of a token depend on the tokens after it, so that a trainer could not reproduce them"
)
_CODEBOOKS = "it generates several codebooks at once"
_REFUSED = {
    "cpmant": _LATER_TOKENS,
    "musicgen": _CODEBOOKS,
    "musicgen_melody": _CODEBOOKS,
    "prophetnet": _LATER_TOKENS,
    "xlm": _LATER_TOKENS,
}
"""Types that the engine does not serve, with the reason."""

_KNOWN = SHARED_CACHE | CACHE_OF_TURNS | CACHE_OF_COMPLETIONS | NO_CACHE

_NOT_PADDED = _types(
    """
    bart bigbird_pegasus blenderbot blenderbot-small blt camembert data2vec-text deepseek_v4 doge inkling_text
    llama4 llama4_text marian mbart minimax_m3_vl_text mvp pegasus plbart recurrent_gemma reformer roberta
    roberta-prelayernorm rwkv trocr xlm-roberta xlm-roberta-xl xlnet xlstm xmod
    """
)
"""Known types that padding changes."""

_PREFIX_TREE = SHARED_CACHE - _types("doge phimoe qwen2_moe idefics3 qwen2_5_vl qwen2_vl smolvlm")
"""Types whose layers can be computed over a tree of prefixes."""

_LOGIT_FACTORS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(_types("cohere cohere2 cohere2_moe cohere_compass_text"), ("logit_scale", 1)),
    **dict.fromkeys(
        _types("granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared"),
        ("logits_scaling", -1),
    ),
    "falcon_h1": ("lm_head_multiplier", 1),
    "hyperclovax": ("logits_scaling", 1),
}
"""Setting and exponent of the factor that a type applies to the outputs of its head."""

_SOFT_CAPS = {
    **dict.fromkeys(
        _types(
            "beam gemma2 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text nanochat "
            "vaultgemma"
        ),
        "final_logit_softcapping",
    ),
    "recurrent_gemma": "logits_soft_cap",
    "xlstm": "output_logit_soft_cap",
}
"""Setting of the soft cap that a type applies to its logits."""

_OTHER_HEADS = _types("inkling_text inkling2_text")
"""Known types that do something else with the outputs of their head."""

_WINDOW = re.compile(r"(^|_)window(_size|_len|_length)?$")


def model_type_of(model: Any) -> str:
    """Return the type of a model; "" if the code of its forward is not that of `transformers`."""
    forward = cast(Any, type(model)).forward
    return model.config.model_type if forward.__module__.startswith("transformers.") else ""


def refusal(model: Any, *, length: int) -> str | None:
    """Return why the engine does not serve a model with contexts of this length; None if it does."""
    config = model.config.get_text_config()
    if config.model_type == "big_bird" and config.attention_type == "block_sparse":
        return f"{_LATER_TOKENS} (attention_type is block_sparse)"
    if 0 < getattr(config, "keep_window_size", length) < length:
        return f"{_LATER_TOKENS} (keep_window_size is {config.keep_window_size}, below the context of {length} tokens)"
    return _REFUSED.get(model.config.model_type)


def proved_cache(model: Any) -> ProvedCache:
    """Return the fastest cache that the table has for a model."""
    kind = model_type_of(model)
    if kind in SHARED_CACHE:
        return "shared"
    if kind in CACHE_OF_TURNS:
        return "turns"
    return "completions" if kind in CACHE_OF_COMPLETIONS else "none"


def can_pad(model: Any) -> bool:
    """Return whether padding to a common width changes no row of a training batch."""
    kind = model_type_of(model)
    return kind in _KNOWN - _NOT_PADDED and not _rotates_by_length(model.config)


def can_share_prefixes(model: Any) -> bool:
    """Return whether rows can be computed as a prefix tree."""
    return model_type_of(model) in _PREFIX_TREE and not _rotates_by_length(model.config)


def logit_scaling(model: Any) -> tuple[float, float | None] | None:
    """Return the factor and the soft cap that a model applies to the outputs of its head; None if it is not known."""
    kind, config = model_type_of(model), model.config.get_text_config()
    if kind not in _KNOWN - _OTHER_HEADS:
        return None
    setting, exponent = _LOGIT_FACTORS.get(kind, ("", 1))
    factor: float | None = getattr(config, setting, None)
    return 1.0 if factor is None else factor**exponent, getattr(config, _SOFT_CAPS.get(kind, ""), None)


def short_window(config: Any, *, length: int) -> int | None:
    """Return an attention window of a configuration that is shorter than `length`, or None."""
    for name, values in _fields(config):
        for value in cast("list[Any]", values) if isinstance(values, list) else [values]:
            if type(value) is int and 0 < value < length and _WINDOW.search(name):
                return value
    return None


def unseen_window(model: Any, *, length: int) -> int | None:
    """Return a window shorter than `length` that the engine's attention would not get, or None."""
    return short_window(model.config, length=length) if model_type_of(model) in _WINDOW_IN_MASK else None


def rope_parameters(model_config: Any) -> list[Mapping[str, Any]]:
    """Return the rope parameters and, if there are several per layer type, each of them."""
    rope: Mapping[str, Any] = getattr(model_config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, Mapping))]


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration and of its text model."""
    for part in (config, config.get_text_config()):
        yield from cast("dict[str, Any]", part.to_dict()).items()


def _rotates_by_length(config: Any) -> bool:
    """Return whether longer sequences change the rotation of all positions."""
    kinds = [rope.get("rope_type") for rope in rope_parameters(config.get_text_config())]
    return "longrope" in kinds or "dynamic" in kinds
