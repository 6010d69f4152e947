"""Sequence lengths at which a model's computation changes, read from its configuration.

A model with a sliding window of 8 tokens treats the ninth token differently from the eighth. Checks that compare two
backends need sequences of such lengths, and sequences that cross them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Sequence length at which a model's computation changes."""

    name: str
    """Field of the configuration, with the fields that contain it: `text_config.sliding_window`."""
    length: int


_LIMITS = re.compile(
    r"""
    (^|_)window(_size|_len|_length)?$                   # sliding and local attention
    | ^local_attention$
    | (^|_)chunk_?(size|length)$ | ^block_size$         # chunked attention, chunked scans of recurrent layers
    | conv\d?d?_(kernel|width|l_cache) | (^|_)d_conv$ | ^cca_time\d$   # causal convolutions, (kernel_dim, kernel_size)
    | ^index_topk$ | ^index_block_size$                 # sparse attention
    | ^original_max_position_embeddings$                # positions: rope, relative biases, scaled logits
    | ^(floor_scale|log_scaling_n_floor|rel_extent)$ | max_distance$
    | ^ngram(_size)?$
    """,
    re.VERBOSE,
)
_OTHER_INPUTS = re.compile(r"vision|image|visual|audio|speech|video|codec|^vq_|^conf_|^sscp_|^vae_")
"""Fields and nested configurations about inputs that are not text."""


def length_limits(config: Any) -> tuple[LengthLimit, ...]:
    """Return the length limits of a configuration, shortest first, without duplicates.

    Nested configurations, dictionaries and lists with one value per layer are included, except those for images and
    sound. A window counts even if `use_sliding_window` is off. None, zero and negative numbers are ignored.

    Args:
        config: Configuration of `transformers`, or a mapping of its fields.
    """
    found = set(_limits_of(_fields(config), path=""))
    return tuple(sorted(found, key=lambda limit: (limit.length, limit.name)))


def _limits_of(fields: Mapping[str, Any], *, path: str) -> Iterator[LengthLimit]:
    for key, value in fields.items():
        name = str(key)
        if _OTHER_INPUTS.search(name):
            continue
        if isinstance(value, Mapping) and name == "compress_rates":
            for kind, rate in cast(Mapping[str, Any], value).items():
                yield from _lengths(f"{path}{name}.{kind}", rate)
        elif isinstance(value, Mapping) or hasattr(value, "to_dict"):
            yield from _limits_of(_fields(value), path=f"{path}{name}.")
        elif _LIMITS.search(name.lower()):
            yield from _lengths(f"{path}{name}", value)
    yield from _products(fields, path=path)


def _products(fields: Mapping[str, Any], *, path: str) -> Iterator[LengthLimit]:
    """Yield the lengths from which sparse attention over blocks of tokens skips some of them."""
    factors = {
        "index_topk_blocks x index_block_size": (
            fields.get("index_topk_blocks"),
            [fields.get("index_block_size")],
        ),
        "index_topk x compress_rates": (
            fields.get("index_topk"),
            cast(Mapping[str, Any], fields.get("compress_rates") or {}).values(),
        ),
        "(5 + 2 x num_random_blocks) x block_size": (  # BigBird attends to all tokens of shorter sequences
            _count_of_blocks(fields.get("num_random_blocks")),
            [fields.get("block_size")],
        ),
    }
    for name, (count, sizes) in factors.items():
        for size in sizes:
            if isinstance(count, int) and isinstance(size, int):
                yield from _lengths(f"{path}{name}", count * size)


def _count_of_blocks(num_random: Any) -> int | None:
    return 5 + 2 * num_random if isinstance(num_random, int) else None


def _lengths(name: str, value: Any) -> Iterator[LengthLimit]:
    values: list[Any] = list(cast(Any, value)) if isinstance(value, (list, tuple)) else [value]
    for length in values:
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            yield LengthLimit(name, length)


def _fields(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return cast(Mapping[str, Any], config)
    return config.to_dict()
