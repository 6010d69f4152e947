"""A tiny model with random weights of one model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.sizes import tiny_settings


@dataclass(frozen=True)
class Family:
    """A model type with one set of options, from which tiny models can be built."""

    name: str
    """The model type, followed by what differs from its options: `qwen3`, `qwen3-window`."""
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the configuration besides the tiny sizes."""
    limits: tuple[int, ...] = ()
    """Lengths in tokens above which the model computes otherwise: windows, chunks, original context lengths."""

    def build(self, seed: int = 0) -> Any:
        """Return a new model in float32 and evaluation mode; a seed and a name always give the same weights."""
        config = self.config()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._model_class()(config).eval()

    def config(self) -> Any:
        """Return a new configuration. Composite types give that of their text model where the class takes it."""
        config_class = CONFIG_MAPPING[self.model_type]
        taken = self._model_class().config_class
        if config_class.sub_configs and not issubclass(config_class, taken):
            config_class = taken
        return config_class(**tiny_settings(config_class, dict(self.changes)))

    def _model_class(self) -> Any:
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type])
