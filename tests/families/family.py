"""A tiny model with random weights of one model type."""

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
"""Standard deviations of the weights that make logits: below the first, next-token distributions are flat."""


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
    causal: bool = True
    """Whether the logits at a position depend on nothing that follows it."""

    def build(self, seed: int = 0) -> Any:
        """Return a new model in float32 and evaluation mode; a seed and a name always give the same weights."""
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
        """Return a new configuration. Composite types give that of their text model where the class takes it."""
        config_class = CONFIG_MAPPING[self.model_type]
        taken = self._model_class().config_class
        if config_class.sub_configs and not issubclass(config_class, taken):
            config_class = taken
        with _quiet():
            return config_class(**tiny_settings(config_class, copy.deepcopy(dict(self.changes))))

    def _model_class(self) -> Any:
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from logging remarks on tiny sizes and on default configurations."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _fill_padding(model: Any) -> None:
    """Give the padding token an embedding like others, which it has in models that were trained on it.

    Keys of zeros would tie in sparse attention, and torch breaks ties by the length of the sequence.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            torch.nn.init.normal_(module.weight.data[module.padding_idx], std=module.weight.std().item())
