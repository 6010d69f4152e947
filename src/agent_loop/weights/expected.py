"""Names and shapes of a model's weights, read from its folder without loading it.

They are needed for engines that fuse weights, because the engine's tensors cannot be compared with the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from agent_loop.errors import WeightsError, did_you_mean

INDEX_FILE = "model.safetensors.index.json"
HEADS = ("lm_head.weight",)
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

Shape = tuple[int, ...]


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
    given: Iterable[tuple[str, Iterable[int]]],
    *,
    tied: Iterable[Iterable[str]] = (),
) -> None:
    """Compare published names and shapes with those of the model.

    Args:
        expected: Result of `expected_weights`.
        given: Published names and shapes, as in `WeightHandle.shapes`.
        tied: Result of `tied_weights`. One name of each group is enough.
    """
    shapes = dict(expected)
    groups = [tuple(group) for group in tied]
    for group in groups:
        known = [name for name in group if name in expected]
        shapes |= {name: expected[known[0]] for name in group if known}
    seen: set[str] = set()
    for name, sizes in given:
        shape = tuple(sizes)
        if name not in shapes:
            raise WeightsError(f"the model has no weight {name!r}{did_you_mean(name, shapes)}")
        if name in seen:
            raise WeightsError(f"weight {name!r} was published twice; publish each weight once")
        if shape != shapes[name]:
            raise WeightsError(
                f"weight {name!r} has shape {shape}, but the model's is {shapes[name]}; publish the weights of the "
                "model that the server runs"
            )
        seen.add(name)
    for group in groups:
        if seen.intersection(group):
            seen.update(group)
    missing = [name for name in expected if name not in seen]
    if missing:
        raise WeightsError(
            f"{len(missing)} of the model's {len(expected)} weights are missing, {missing[0]!r} first; publish all of "
            "them at once"
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
