"""Tiny models with random weights of one model type."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from tests.families.sizes import tiny_settings

NARROW, WIDE = 0.2, 0.3
"""Standard deviations of the output head's weights. Below `NARROW`, next-token distributions are flat and the weights
are drawn again with `WIDE`."""


@dataclass(frozen=True)
class Family:
    """Model type with one set of options, from which tiny models are built."""

    name: str
    """Model type, followed by the name of a variant: `qwen3`, `qwen3-window`."""
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the configuration in addition to the tiny sizes."""
    limits: tuple[int, ...] = ()
    """Lengths in tokens above which the computation changes: windows, chunks, original context lengths."""
    causal: bool = True
    """Whether the logits at a position do not depend on later tokens."""

    def build(self, seed: int = 0) -> Any:
        """Return a new model in float32 and evaluation mode. Its weights depend only on the seed and the family."""
        config = self.config()
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(seed)
            model = self._model_class()(config).eval()
            head = model.get_output_embeddings()
            if isinstance(head, torch.nn.Linear) and head.weight.std() < NARROW:
                torch.nn.init.normal_(head.weight, std=WIDE)
            _fill_padding(model)
            return model

    def config(self) -> Any:
        """Return a new configuration. It is that of the text model for a composite type whose model class takes it."""
        config_class = CONFIG_MAPPING[self.model_type]
        model_config_class = self._model_class().config_class
        if config_class.sub_configs and not issubclass(config_class, model_config_class):
            config_class = model_config_class
        with _quiet():
            return config_class(**tiny_settings(config_class, copy.deepcopy(dict(self.changes))))

    def _model_class(self) -> Any:
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type])


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of transformers about tiny sizes and default configurations."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _fill_padding(model: Any) -> None:
    """Initialize the embedding of the padding token like the others, as in models that were trained on it.

    Keys of zeros would have equal scores in sparse attention, and torch's choice among them depends on the length of
    the sequence.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            torch.nn.init.normal_(module.weight.data[module.padding_idx], std=module.weight.std().item())
