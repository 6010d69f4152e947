"""Comparison of vocabularies: models that score the same tokens have to mean the same texts by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers import AutoTokenizer

from agent_loop.config import Config
from agent_loop.errors import ConfigError

MAX_NAMED = 3
"""Number of tokens that an error names."""


def load_vocabulary(path: str, config: Config) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer, by their texts.

    Raises:
        ConfigError: There is no such tokenizer.
    """
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{path!r} has no tokenizer that transformers loads: {reason}") from error
    return dict(tokenizer.get_vocab())


def refuse_other_vocabulary(own: Mapping[str, int], other: Mapping[str, int], *, key: str, path: str) -> None:
    """Raise an error unless two vocabularies give each token the same id.

    Args:
        own: Vocabulary of the policy.
        other: Vocabulary of the other model.
        key: Setting that names the other model.
        path: The other model.

    Raises:
        ConfigError: The vocabularies differ.
    """
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if not differing:
        return
    named = ", ".join(map(repr, differing[:MAX_NAMED]))
    raise ConfigError(
        f"{key} is {path!r}, whose vocabulary differs from the policy's in {len(differing)} tokens ({named}, ...), so "
        "its log-probs are those of other texts; give a model with the same tokenizer"
    )
