"""Placeholder tokenizer for a chat template that comes without a model."""

from __future__ import annotations

import re
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|placeholder_begin|>", "<|placeholder_end|>"
VOCAB_SIZE = 800

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Split pattern of Qwen2 and later tokenizers: newlines stay with the punctuation before them."""
MERGED = tuple(f"{end}{run}" for run in ("\n", "\n\n", "\n\n\n") for end in ("", " ", *".,:;!?)]}>\"'`*"))
"""Texts that are one token each, as in most large vocabularies."""
NUM_REPEATS = 100
"""Repetitions of `MERGED` in the training text: enough for them to be merged first."""

_MARKERS = (
    r"<\|[^\s<>|{}]+\|?>",  # <|im_end|> and <|turn>
    r"<[^\s<>|{}/]+\|>",  # <turn|>
    r"<\uff5c[^\s<>{}]+\uff5c>",  # vertical bars of full width
    r"</?(?:s|sop|think|bos|eos|pad|start_of_turn|end_of_turn|start_of_image|end_of_utterance|image)>",
    r"</?(?:tool_call|tool_response|tool_calls|function_calls|arg_key|arg_value)>",
    r"\[/?[A-Z][A-Z_]*\]",  # [INST]
    r"\[gMASK\]",
)


def placeholder_tokenizer(chat_template: str) -> Any:
    """Return a small byte-level BPE tokenizer whose control tokens are the markers in the template's text.

    Newlines are merged with each other and with punctuation, as in the vocabularies of most models. Other text is split
    differently, so token counts differ from those of the model. The text that the template renders is the same.
    """
    from transformers import PreTrainedTokenizerFast  # late: importing transformers takes seconds

    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    cast(Any, backend).pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    cast(Any, backend).decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    newlines = [f"x{text}x" for text in MERGED] * NUM_REPEATS
    backend.train_from_iterator([re.sub("|".join(_MARKERS), " ", chat_template), *newlines], trainer)
    markers = control_markers(chat_template)
    cast(Any, backend).add_special_tokens(
        [AddedToken(m, normalized=False, special=True) for m in (BOS, EOS, *markers)]
    )
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = chat_template
    return tokenizer


def control_markers(chat_template: str) -> list[str]:
    """Return the distinct texts in a template that look like control tokens, in order of appearance."""
    without_comments = re.sub(r"\{#.*?#\}", "", chat_template, flags=re.DOTALL)
    return list(dict.fromkeys(re.findall("|".join(f"(?:{marker})" for marker in _MARKERS), without_comments)))
