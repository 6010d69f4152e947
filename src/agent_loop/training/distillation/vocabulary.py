"""Comparison of the vocabularies of teachers and policy, before any server starts."""

from __future__ import annotations

from typing import Any

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.training.vocabularies import load_vocabulary, refuse_other_vocabulary


def refuse_other_teachers(config: Config, *, tokenizer: Any = None) -> None:
    """Raise an error unless the tokenizers of policy and teachers give each token the same id.

    Args:
        config: All settings.
        tokenizer: The policy's tokenizer; None loads it.

    Raises:
        ConfigError: A teacher has other tokens, or a tokenizer cannot be loaded.
    """
    if not config.distillation.teachers:
        return
    own_path = config.model.tokenizer_path or config.model.path
    own = load_vocabulary(own_path, config) if tokenizer is None else dict[str, int](tokenizer.get_vocab())
    for name, teacher in config.distillation.teachers.items():
        key, path = f"distillation.teachers.{name}", teacher.tokenizer_path or teacher.path
        if not path and teacher.server_url is None:
            continue  # the policy's own model
        if not path:
            raise ConfigError(
                f"{key} is at {teacher.server_url}, and its vocabulary has to be compared with the policy's; set "
                f"{key}.tokenizer_path"
            )
        try:
            other = load_vocabulary(path, config)
        except ConfigError as error:
            raise ConfigError(f"{error}; set {key}.tokenizer_path, to compare its vocabulary") from error
        refuse_other_vocabulary(own, other, key=key, path=path)
