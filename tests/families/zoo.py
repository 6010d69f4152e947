"""Tiny models with random weights of every causal language model that transformers can build, and of variants.

`FAMILIES` lists them. Models that are named after their type have no window or similar limit below `MAX_POSITIONS`.
The variants have limits of 8 to 24 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.family import Family
from tests.families.overrides import NOT_BUILT, NOT_CAUSAL, OVERRIDES
from tests.families.sizes import MAX_POSITIONS, PLAIN_IDS, VOCAB_SIZE
from tests.families.variants import variants

__all__ = [
    "FAMILIES",
    "MAX_POSITIONS",
    "NOT_BUILT",
    "PLAIN_IDS",
    "VOCAB_SIZE",
    "Family",
    "each_family",
    "token_ids",
]


def _families() -> dict[str, Family]:
    known = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in NOT_BUILT]
    plain = [Family(kind, kind, OVERRIDES.get(kind, {})) for kind in known]
    varied = [
        replace(family, changes={**OVERRIDES.get(family.model_type, {}), **family.changes})
        for family in variants()
        if family.model_type in known
    ]
    return {
        family.name: replace(
            family, causal=family.name not in NOT_CAUSAL and family.model_type not in NOT_CAUSAL
        )
        for family in (*plain, *varied)
    }


FAMILIES: dict[str, Family] = _families()
"""All families by name: the types in the order of transformers, then the variants."""


def each_family(*names: str, where: Callable[[Family], bool] = lambda family: True) -> Any:
    """Parametrize a test over `family`: the named families, or all of them, filtered by `where`."""
    selected = [FAMILIES[name] for name in names or FAMILIES]
    return pytest.mark.parametrize("family", [pytest.param(f, id=f.name) for f in selected if where(f)])


def token_ids(length: int, *, seed: int = 0) -> list[int]:
    """Return random ids of plain tokens, which are not tokens for padding, end or images."""
    return random.Random(seed).choices(PLAIN_IDS, k=length)
