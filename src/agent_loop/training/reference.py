"""The reference policy, and comparison of the vocabularies of models that score the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import AutoTokenizer, PreTrainedModel

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.training.policy import load_policy

MAX_NAMED = 3
"""Number of tokens that an error names."""


def load_vocabulary(path: str, config: Config) -> dict[str, int]:
    """Return the ids of all tokens of a tokenizer, by their texts."""
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{path!r} has no tokenizer that transformers loads: {reason}") from error
    return dict(tokenizer.get_vocab())


def refuse_other_vocabulary(own: Mapping[str, int], other: Mapping[str, int], *, key: str, path: str) -> None:
    """Raise an error unless two vocabularies give each token the same id."""
    differing = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if not differing:
        return
    named = ", ".join(map(repr, differing[:MAX_NAMED]))
    raise ConfigError(
        f"{key} is {path!r}, whose vocabulary differs from the policy's in {len(differing)} tokens ({named}, ...), so "
        "its log-probs are those of other texts; give a model with the same tokenizer"
    )


def load_reference(
    config: Config, *, policy: PreTrainedModel | None = None, device: str | None = None
) -> PreTrainedModel | None:
    """Load the reference policy of the KL penalties; None if no penalty has a weight.

    `placement` may give it the CPU, or a device of its own: the second that this process sees.

    Args:
        config: All settings.
        policy: The policy. If it has adapters and the reference is the policy at the start of the run, the result is
            this model: without its adapters, it is the reference.
        device: Device to load it to, instead of `model.device`.
    """
    if not (config.actor.kl_loss_coef or config.algorithm.kl_reward_coef):
        return None
    path = config.actor.reference_path
    if policy is not None and config.model.lora_rank and path is None:
        return policy
    if path is not None:
        _check_vocabulary(config, path)
    placement = config.placement
    has_own_device = (
        placement.split is not None and placement.split.reference and torch.cuda.device_count() > 1
    )
    if placement.reference == "cpu" or has_own_device:
        device = "cpu"
    changes = {
        "lora_rank": 0,
        "base_bits": None,
        "path": path or config.model.path,
        "device": device or config.model.device,
    }
    model = load_policy(config.model.model_copy(update=changes))
    return cast(Any, model).to("cuda:1") if has_own_device else model


def _check_vocabulary(config: Config, path: str) -> None:
    """Compare the tokenizers. A model without a tokenizer is compared by its loader, which needs as many ids."""
    try:
        own = load_vocabulary(config.model.tokenizer_path or config.model.path, config)
        other = load_vocabulary(path, config)
    except ConfigError:
        return
    refuse_other_vocabulary(own, other, key="actor.reference_path", path=path)
