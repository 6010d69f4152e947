"""Weights of a model: their names and shapes in its files, and their replacement in place.

`transformers` stacks the experts of a layer into one parameter when it loads a model. Engines read the weights of each
expert under the names of the files, so trainers publish those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, conversion_mapping, core_model_loading

from agent_loop.errors import WeightsError
from agent_loop.weights.expected import Shape, check_weights

_loading: Any = core_model_loading


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Validate all weights, then copy them into the model's tensors.

    Names are those of the model's files or of its state dict.
    One name is enough for tied weights, such as an embedding that is also the output head. If several names are given,
    their values must be equal. Buffers may be missing.
    """
    for name, weight in weights.items():
        if not torch.is_tensor(weight):
            raise WeightsError(f"weight {name!r} is a {type(weight).__name__}; give a torch.Tensor")
    weights = from_file_weights(model, weights)
    state: dict[str, Any] = cast(Any, model).state_dict()
    targets = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    expected = {names[0]: shapes[names[0]] for names in names_of.values()}
    check_weights(expected, weights, tied=names_of.values(), optional=shapes)
    with torch.no_grad():
        for name, weight in weights.items():
            targets[name].copy_(weight)


def to_file_weights(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the names and in the shapes that `save_pretrained` writes. Most are not copied."""
    if not has_own_names(model):
        yield from weights
        return
    for _, layer in groupby(weights, key=lambda weight: _layer_of(weight[0])):
        yield from _loading.revert_weight_conversion(model, dict(layer)).items()


def has_own_names(model: PreTrainedModel) -> bool:
    """Return whether some parameters of a model have other names or shapes than in its files."""
    return bool(_conversions(model))


def from_file_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return weights by the names and in the shapes of the model's state dict."""
    state: Mapping[str, Tensor] = cast(Any, model).state_dict()
    if weights.keys() <= state.keys() or not has_own_names(model):
        return weights
    _check_parts(model, weights, state=state)
    conversions = _conversions(model)
    renamings = [each for each in conversions if isinstance(each, _loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, _loading.WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    steps: dict[str, Any] = {}
    for name in sorted(weights, key=_loading.dot_natural_key):  # the order of the experts in their stack
        own_name, pattern = _loading.rename_source_key(
            name, renamings, converters, cast(Any, model).base_model_prefix, state
        )
        if own_name not in state:
            own_name, pattern = name, None
        if pattern is None:
            step, pattern = _loading.WeightRenaming(name, own_name), name
        else:
            step = deepcopy(converter_of[pattern])
        steps.setdefault(own_name, step).add_tensor(own_name, name, pattern, weights[name])
    found: dict[str, Tensor] = {}
    for own_name, step in steps.items():
        converted = step.convert(own_name, model=model, config=model.config)
        found |= {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
    return found


def _check_parts(
    model: PreTrainedModel, weights: Mapping[str, Tensor], *, state: Mapping[str, Tensor]
) -> None:
    """Compare weights with those that the files would have. Weights under the model's own names are checked later."""

    def shapes_of(own: Iterable[tuple[str, Tensor]]) -> dict[str, Shape]:
        empty = ((name, tensor.detach().to("meta")) for name, tensor in own)
        return {name: tuple(tensor.shape) for name, tensor in to_file_weights(model, empty)}

    check_weights(
        {
            name: shape
            for name, shape in shapes_of(model.named_parameters()).items()  # names tied weights once
            if name not in state
        },
        {name: weight for name, weight in weights.items() if name not in state},
        optional=shapes_of(state.items()),
    )


def _layer_of(name: str) -> str:
    """Return the name up to the first number. Conversions stay within a layer."""
    return re.sub(r"(\d+).*", r"\1", name, count=1)


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Return the conversions of loading: those that loaded the model, or those of its type."""
    used: list[Any] | None = getattr(model, "_weight_conversions", None)
    if used is not None:
        return used
    found: list[Any] = cast(Any, conversion_mapping).get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in found if not isinstance(each, _loading.PrefixChange)]
