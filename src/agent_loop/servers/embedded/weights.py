"""Replacement of a model's weights in place, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.errors import WeightsError, did_you_mean
from agent_loop.servers.embedded.file_names import from_file_weights


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Validate all weights, then copy them into the model's tensors.

    Names are those of the model's files or of its state dict; see `agent_loop.servers.embedded.file_names`.
    One name is enough for tied weights, such as an embedding that is also the output head. If several names are given,
    their values must be equal. Buffers may be missing.

    Raises:
        WeightsError: A name or shape does not fit, or a weight is missing. The model is unchanged.
    """
    weights = from_file_weights(model, weights)
    targets = _targets(model)
    for name, weight in weights.items():
        if name not in targets:
            raise WeightsError(f"the model has no weight {name!r}{did_you_mean(name, targets)}")
        if weight.shape != targets[name].shape:
            raise WeightsError(
                f"weight {name!r} has shape {tuple(weight.shape)}, but the model's is {tuple(targets[name].shape)}; "
                "publish the weights of the model that the server runs"
            )
        if weight.is_meta:
            raise WeightsError(
                f"weight {name!r} is on the meta device and holds no data; materialize it first"
            )
    _check_tied(model, weights=weights)
    with torch.no_grad():
        for name, weight in weights.items():
            targets[name].copy_(weight)


def _targets(model: PreTrainedModel) -> dict[str, Tensor]:
    state: dict[str, Any] = cast(Any, model).state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _check_tied(model: PreTrainedModel, *, weights: Mapping[str, Tensor]) -> None:
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for names in names_of.values():
        given = [name for name in names if name in weights]
        if not given:
            raise WeightsError(f"weight {names[0]!r} is missing; publish all {len(names_of)} weights at once")
        for name in given[1:]:
            if not torch.equal(weights[name], weights[given[0]]):
                raise WeightsError(
                    f"weights {given[0]!r} and {name!r} are tied in this model but were published with different "
                    "values; publish only one of them, or untie them in the model's config"
                )
