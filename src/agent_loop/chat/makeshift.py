"""A tokenizer for a chat template that comes as a file alone."""

from __future__ import annotations

import re
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|makeshift_begin|>", "<|makeshift_end|>"
VOCAB_SIZE = 600

_MARKERS = (
    r"<\|[^\s<>|{}]+\|?>",  # <|im_end|> and <|turn>
    r"<[^\s<>|{}/]+\|>",  # <turn|>
    r"<\uff5c[^\s<>{}]+\uff5c>",  # vertical bars of full width
    r"</?(?:s|sop|think|bos|eos|pad|start_of_turn|end_of_turn|start_of_image|end_of_utterance|image)>",
    r"</?(?:tool_call|tool_response|tool_calls|function_calls|arg_key|arg_value)>",
    r"\[/?[A-Z][A-Z_]*\]",  # [INST]
    r"\[gMASK\]",
)


def makeshift_tokenizer(chat_template: str) -> Any:
    """A small byte-level BPE tokenizer whose control tokens are the markers in the template's text.

    It splits text otherwise than the model's own tokenizer, so numbers of tokens differ; what a template writes, and in
    which order, does not.
    """
    from transformers import PreTrainedTokenizerFast  # late: importing transformers takes seconds

    backend = Tokenizer(models.BPE())
    cast(Any, backend).pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cast(Any, backend).decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([re.sub("|".join(_MARKERS), " ", chat_template)], trainer)
    markers = control_markers(chat_template)
    cast(Any, backend).add_special_tokens(
        [AddedToken(m, normalized=False, special=True) for m in (BOS, EOS, *markers)]
    )
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)
    tokenizer.chat_template = chat_template
    return tokenizer


def control_markers(chat_template: str) -> list[str]:
    """What looks like a control token in a template's text, each once, in order."""
    without_comments = re.sub(r"\{#.*?#\}", "", chat_template, flags=re.DOTALL)
    return list(dict.fromkeys(re.findall("|".join(f"(?:{marker})" for marker in _MARKERS), without_comments)))
