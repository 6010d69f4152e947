"""The reference policy: the policy at the start of the run, or a teacher."""

from __future__ import annotations

from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedModel

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.training.policy import load_policy

_MAX_NAMED = 3
"""Number of tokens that an error names."""


def load_reference(
    config: Config, *, policy: PreTrainedModel | None = None, device: str | None = None
) -> PreTrainedModel | None:
    """Load the reference policy of the KL penalties; None if no penalty has a weight.

    Args:
        config: All settings.
        policy: The policy. If it has adapters and the reference is the policy at the start of the run, the result is
            this model: without its adapters, it is the reference.
        device: Device to load it to, instead of `model.device`.

    Raises:
        ConfigError: The model cannot be loaded, or has other tokens than the policy.
    """
    if not (config.actor.kl_loss_coef or config.algorithm.kl_reward_coef):
        return None
    path = config.actor.reference_path
    if policy is not None and config.model.lora_rank and path is None:
        return policy
    if path is not None:
        _check_vocabulary(config, path)
    changes = {"lora_rank": 0, "path": path or config.model.path, "device": device or config.model.device}
    return load_policy(config.model.model_copy(update=changes))


def _check_vocabulary(config: Config, path: str) -> None:
    """Raise an error unless the tokenizers of policy and reference give each token the same id.

    A reference without a tokenizer is compared by its loader, which needs as many ids.
    """
    own = _vocabulary(config.model.tokenizer_path or config.model.path, config)
    other = _vocabulary(path, config)
    if own is None or other is None or own == other:
        return
    differing = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
    named = ", ".join(map(repr, differing[:_MAX_NAMED]))
    raise ConfigError(
        f"actor.reference_path is {path!r}, whose vocabulary differs from the policy's in {len(differing)} tokens "
        f"({named}, ...), so its log-probs are those of other texts; give a model with the same tokenizer"
    )


def _vocabulary(path: str, config: Config) -> dict[str, int] | None:
    """Return the ids of all tokens by their names; None if there is no tokenizer."""
    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError):
        return None
    return dict(tokenizer.get_vocab())
