"""Sizes of a model, counted on torch's meta device, where tensors take no memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import parse_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
FULL = 4
"""Bytes of a float32 number."""
PROBE_TOKENS = 60
"""Tokens of the forward that counts activations; no usual size of a window, a chunk or a head."""


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Sizes of a model. Tied weights count once."""

    model: Any
    """The model, on the meta device."""

    @property
    def model_type(self) -> str:
        return self.model.config.model_type

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def root_parameters(self) -> int:
        """Parameters of the embedding and the head."""
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings()
        return embedding.numel() * (1 if head is None or head.weight is embedding else 2)

    @property
    def layer_parameters(self) -> int:
        """All other parameters, divided by the number of layers."""
        return (self.parameters - self.root_parameters) // self.layers

    @cached_property
    def largest_parameter(self) -> int:
        return max(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def linear(self) -> Sequence[Tensor]:
        """Weights of the linear layers but the head. Stacked experts are not linear layers."""
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        head = self.model.get_output_embeddings()
        return [
            m.weight for m in self.model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head
        ]

    @property
    def layers(self) -> int:
        return int(getattr(self._text, "num_hidden_layers", 1))

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def hidden(self) -> int:
        return self.model.get_input_embeddings().weight.shape[1]

    @property
    def query_width(self) -> int:
        """Width of the result of attention in a layer; the hidden width if it differs between layers."""
        try:
            heads = int(getattr(self._text, "num_attention_heads", 1) or 1)
            return heads * int(getattr(self._text, "head_dim", None) or self.hidden // heads)
        except RuntimeError:  # raised by configurations with a value per layer
            return self.hidden

    @property
    def max_positions(self) -> int | None:
        return getattr(self._text, "max_position_embeddings", None)

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of adapters on all linear layers but the head."""
        return rank * sum(sum(weight.shape) for weight in self.linear)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        _, cache_width = self._frozen_probe
        return (cache_width or 2 * self.layers * self.hidden) * itemsize

    def activation_bytes(self, itemsize: int, *, is_frozen: bool) -> float:
        """Return the bytes per token that the forward of all layers keeps for the backward pass.

        Args:
            itemsize: Bytes of a number that the model computes with.
            is_frozen: Whether adapters alone are trained.
        """
        numbers, _ = self._frozen_probe if is_frozen else self._probe
        return numbers[2] * itemsize + numbers[FULL] * FULL

    @cached_property
    def _probe(self) -> tuple[Mapping[int, float], int]:
        return _probe(self.model, trained=list(self.model.parameters()), linear=self.linear)

    @cached_property
    def _frozen_probe(self) -> tuple[Mapping[int, float], int]:
        return _probe(self.model, trained=self.linear, linear=self.linear)

    @property
    def _text(self) -> Any:
        return self.model.config.get_text_config()


def read_shape(path: str | Path) -> ModelShape:
    """Read the configuration of a model, and count its sizes.

    Args:
        path: A `config.json`, a folder with one, or the hub name of a model that is in the local cache.

    Raises:
        ConfigError: There is no such file, or `transformers` has no language model for it.
    """
    file = _find(path)
    try:
        values = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    return parse_shape(cast(Any, values) if isinstance(values, dict) else {}, where=str(file))


def parse_shape(values: Mapping[str, Any], *, where: str) -> ModelShape:
    """Return the sizes of the model that the contents of a `config.json` describe.

    Raises:
        ConfigError: `transformers` has no language model for it.
    """
    import torch  # late, as transformers is: this module is imported where torch may be missing
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    known: Any = AutoConfig
    try:
        config = known.for_model(**{"model_type": None, **values})
        has_vision = getattr(config, "vision_config", None) is not None
        make: Any = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        with torch.device("meta"), no_init_weights():
            model = make.from_config(config, dtype=torch.bfloat16).eval()
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{where} describes no language model of transformers: {reason}") from error
    model.tie_weights()
    return ModelShape(model)


def _probe(
    model: Any, *, trained: Sequence[Tensor], linear: Sequence[Tensor]
) -> tuple[Mapping[int, float], int]:
    """Run a forward on the meta device, with a model in bfloat16.

    A model whose forward reads values of tensors cannot run there. Then the inputs and outputs of all linear layers
    count, and the KV cache is not known.

    Returns:
        The numbers per token that the forward keeps for the backward pass, by their bytes, and those in the KV cache.
    """
    import torch

    model.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)
    kept: dict[int, Tensor] = {}
    own = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def keep(tensor: Tensor) -> Tensor:
        is_score = tensor.shape[-2:] == (PROBE_TOKENS, PROBE_TOKENS)  # which fused attention does not keep
        if not is_score and _storage(tensor) not in own:
            kept.setdefault(_storage(tensor), tensor)
        return tensor

    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = model.base_model(input_ids=ids, use_cache=True)
    except Exception:  # noqa: BLE001  (whatever a model raises on tensors without values)
        return {2: float(sum(sum(weight.shape) for weight in linear)), FULL: 0.0}, 0
    numbers = {2: 0.0, FULL: 0.0}
    for tensor in kept.values():
        size = 2 if tensor.itemsize == 2 else FULL
        numbers[size] += tensor.untyped_storage().nbytes() / size / PROBE_TOKENS
    layers: Sequence[Any] = getattr(getattr(result, "past_key_values", None), "layers", ())
    cached = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return numbers, sum(tensor.numel() for tensor in cached if tensor is not None) // PROBE_TOKENS


def _storage(tensor: Tensor) -> int:
    """Return the identity of the storage, which views share."""
    return cast(Any, tensor.untyped_storage())._cdata


def _find(path: str | Path) -> Path:
    given = Path(path)
    if given.is_file():
        return given
    if (given / CONFIG_FILE).is_file():
        return given / CONFIG_FILE
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = sorted(
        (home / "hub" / f"models--{str(path).replace('/', '--')}").glob(f"snapshots/*/{CONFIG_FILE}")
    )
    if not str(path) or not cached:
        raise ConfigError(
            f"model.path is {str(path)!r}, and there is no {CONFIG_FILE} of it on this machine; give --model "
            f"path/to/{CONFIG_FILE}"
        )
    return cached[-1]
