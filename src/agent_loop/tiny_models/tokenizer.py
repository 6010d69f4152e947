"""Byte-level BPE tokenizers trained for one task, so that a whole tool call is about a dozen tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_loop.types import Message

CHATML_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HERMES_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
MAX_VOCAB_SIZE = 768
"""Vocabulary in which every phrase of a small task becomes one token."""


def train_tokenizer(
    conversations: Iterable[Sequence[Message]],
    *,
    tools: Sequence[dict[str, Any]],
    vocab_size: int = MAX_VOCAB_SIZE,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that learned its merges from rendered conversations.

    Each digit is a token. Any other text between two markers may merge into one token, even if it has many words.
    No merge crosses a marker or the line with the role that opens a turn. A conversation encoded turn by turn
    therefore has the same tokens as one encoded at once. The vocabulary includes all 256 bytes, so that every text
    round-trips.

    Args:
        conversations: The conversations.
        tools: Tool schemas in all of their prompts.
        vocab_size: Upper limit of the vocabulary. Training ends earlier if no merge is left.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"^(system|user|assistant)\n"), behavior="isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(marker, special=True, normalized=False) for marker in CHATML_MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_texts_between_markers(conversations, tools=tools), trainer)
    cast(Any, core).add_tokens(
        [AddedToken(marker, special=False, normalized=False) for marker in HERMES_MARKERS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=CHAT_TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )


def render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]]
) -> str:
    """Return the conversation as text, rendered with the tokenizer's chat template."""
    return str(cast(Any, tokenizer).apply_chat_template(list(messages), tools=list(tools), tokenize=False))


def end_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the token that ends a turn."""
    return cast(int, tokenizer.eos_token_id)


def pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id of the padding token."""
    return cast(int, tokenizer.pad_token_id)


def _texts_between_markers(
    conversations: Iterable[Sequence[Message]], *, tools: Sequence[dict[str, Any]]
) -> Iterator[str]:
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    marker = re.compile("|".join(map(re.escape, CHATML_MARKERS + HERMES_MARKERS)))
    for messages in conversations:
        yield from marker.split(render(renderer, messages, tools=tools))
