"""Names and shapes of a model's weights, read from its folder without loading it.

They are needed for engines that fuse weights, because the engine's tensors cannot be compared with the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agent_loop.errors import WeightsError, did_you_mean

INDEX_FILE = "model.safetensors.index.json"
HEADS = ("lm_head.weight",)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

Shape = tuple[int, ...]
NO_SHAPES: Mapping[str, Shape] = {}


def expected_weights(model_path: str | Path) -> dict[str, Shape]:
    """Return names and shapes of the weights in a model's folder, from the headers of its safetensors files."""
    folder = Path(model_path)
    found: dict[str, Shape] = {}
    for file in _weight_files(folder):
        try:
            with cast(Any, safe_open(file, framework="pt")) as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{str(file)!r} cannot be read: {error}; download the model again") from error
    return found


def tied_weights(model_path: str | Path) -> tuple[tuple[str, ...], ...]:
    """Return groups of names that share one weight: the embedding and the output head, or no group.

    The two are tied if the configuration says so, or if the folder has an embedding but no output head.
    """
    names = expected_weights(model_path)
    heads = [name for name in names if name.endswith(HEADS)]
    embeddings = [name for name in names if name.endswith(EMBEDDINGS)]
    if not embeddings or (heads and not _is_configured_tied(Path(model_path))):
        return ()
    return ((embeddings[0], heads[0] if heads else HEADS[0]),)


def check_weights(
    expected: Mapping[str, Shape],
    given: Mapping[str, Tensor],
    *,
    tied: Iterable[Sequence[str]] = (),
    optional: Mapping[str, Shape] = NO_SHAPES,
    value_of: Callable[[str], Tensor] | None = None,
) -> None:
    """Compare published weights with those of a model. One of several tied weights is enough.

    Args:
        expected: Names and shapes of the weights that must be given.
        tied: Groups of names that share one weight.
        optional: Names and shapes of weights that may be given too.
        value_of: Returns the value of a given weight, if it is another than the tensor.
    """
    groups = [tuple(group) for group in tied]
    shapes = {**optional, **expected}
    for group in groups:
        known = [name for name in group if name in expected]
        shapes |= {name: expected[known[0]] for name in group if known}
    for name, weight in given.items():
        if not torch.is_tensor(weight):
            raise WeightsError(f"weight {name!r} is a {type(weight).__name__}; give a torch.Tensor")
        if name not in shapes:
            raise WeightsError(f"the model has no weight {name!r}{did_you_mean(name, shapes)}")
        if tuple(weight.shape) != shapes[name]:
            raise WeightsError(
                f"weight {name!r} has shape {tuple(weight.shape)}, but the model's is {shapes[name]}; publish the "
                "weights of the model that the server runs"
            )
        if weight.is_meta:
            raise WeightsError(
                f"weight {name!r} is on the meta device and holds no data; materialize it first"
            )
    covered = {name for group in groups if not given.keys().isdisjoint(group) for name in group}
    missing = [name for name in expected if name not in given and name not in covered]
    if missing:
        raise WeightsError(
            f"{len(missing)} of the model's {len(expected)} weights are missing, {missing[0]!r} first; publish all of "
            "them at once"
        )
    value_of = value_of or given.__getitem__
    for group in groups:
        first, *others = [name for name in group if name in given] or [""]
        for name in others:
            if not torch.equal(value_of(name), value_of(first)):
                raise WeightsError(
                    f"weights {first!r} and {name!r} are tied in this model but were published with different "
                    "values; publish one of them, or untie them in the model's config"
                )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(
                f"{str(index)!r} cannot be read: {error!r}; download the model again"
            ) from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(
            f"{str(folder)!r} has no safetensors files, so the names of the model's weights are unknown; give the "
            "folder of a model in that format (save_pretrained writes it)"
        )
    return files


def _is_configured_tied(folder: Path) -> bool:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    text: dict[str, Any] = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
