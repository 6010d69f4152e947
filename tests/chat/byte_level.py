"""Small byte-level BPE tokenizers, each with the splitting and normalisation of a model family."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN3_5 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
PATTERNS = {"gpt2": "", "qwen2": QWEN2, "llama3": LLAMA3, "qwen3.5": QWEN3_5, "gpt-oss": GPT_OSS}

CONTROLS = [
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
TEXTS = [
    "the quick brown fox says hello to the model, and the model says: hello, fox! It's what I'LL say.",
    'def add(a, b):\n    """Adds."""\n    return a + b\n\n\nprint(add(1, 22))  # 1234 56789   \t\n',
    "naïve café, Ångström über größe; ¿qué? 你好世界。こんにちは 안녕하세요 привет мир नमस्ते שלום مرحبا 👩‍🚀🎉",
    '{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}\r\n\r\n<div>&amp;</div> //// ==== ....',
]


def untrained() -> Any:
    """Return a tokenizer whose vocabulary is the bytes."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def trained(tokenizer: Any, *, controls: list[AddedToken] | None = None) -> Any:
    """Return the tokenizer with merges, and with control tokens after its vocabulary."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens(controls or [AddedToken(text, normalized=False, special=True) for text in CONTROLS])
    return tokenizer


@cache
def like(family: str) -> Any:
    """Return a tokenizer that splits and normalises like the tokenizers of a family."""
    tokenizer = untrained()
    if PATTERNS[family]:
        tokenizer.pre_tokenizer = split_by(PATTERNS[family])
    if family.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    if family == "llama3":
        tokenizer.model = models.BPE(ignore_merges=True)
    return trained(tokenizer)


def split_by(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
