"""Tests that there is a valid tiny model of every causal language model that transformers can build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.zoo import FAMILIES, NOT_BUILT, VOCAB_SIZE, Family, each_family, token_ids

LENGTH = 40
PARAMETERS = 3_000_000
"""Upper bound of the number of parameters of a tiny model."""


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def check(family: Family) -> None:
    model = family.build()
    values = logits(model, token_ids(LENGTH))
    assert values.dtype == torch.float32
    assert not model.training
    assert tuple(values.shape) == (LENGTH, VOCAB_SIZE)
    assert values.isfinite().all()
    entropy = torch.distributions.Categorical(logits=values).entropy().mean()
    assert 0.3 < entropy < 4.4, f"the next-token distributions are flat or certain: entropy {entropy:.2f}"
    assert sum(parameter.numel() for parameter in model.parameters()) < PARAMETERS
    ids = [
        getattr(model.config.get_text_config(), f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")
    ]
    assert all(value is None or 0 <= value < VOCAB_SIZE for value in ids)


@pytest.mark.nightly(keep=10)
@pytest.mark.slow
@each_family()
def test_every_family_builds_and_gives_distributions_that_are_neither_flat_nor_certain(
    family: Family,
) -> None:
    check(family)


def test_every_type_of_transformers_is_built_or_listed_with_the_reason() -> None:
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    missing = types - FAMILIES.keys() - NOT_BUILT.keys()
    assert not missing, f"add these types to the zoo: {sorted(missing)}"
    assert all(NOT_BUILT.values())
    assert {family.model_type for family in FAMILIES.values()} | NOT_BUILT.keys() == types


@pytest.mark.slow
def test_every_text_model_with_a_window_has_a_variant_with_a_short_window() -> None:
    windowed = {
        name for name, family in FAMILIES.items() if name == family.model_type and has_window(family.config())
    }
    missing = {
        name for name in windowed if f"{name}-window" not in FAMILIES and f"{name}_text" not in FAMILIES
    }
    assert not missing, f"add these types to WINDOWED in variants.py: {sorted(missing)}"


def has_window(config: Any) -> bool:
    return isinstance(getattr(config, "sliding_window", None), int) and config.sliding_window > 0


def difference_from_its_type(family: Family, length: int) -> float:
    plain, varied = FAMILIES[family.model_type].build(), family.build()
    varied.load_state_dict(plain.state_dict())
    ids = token_ids(length)
    return float((logits(plain, ids) - logits(varied, ids)).abs().max())


def comparable(family: Family) -> bool:
    return bool(family.limits) and not (family.name.startswith("inkling") and family.name.endswith("-window"))


@pytest.mark.nightly(keep=10)
@pytest.mark.slow
@each_family(where=comparable)
def test_a_limit_changes_the_logits_of_longer_sequences(family: Family) -> None:
    assert difference_from_its_type(family, LENGTH) > 1e-3


@pytest.mark.nightly(keep=10)
@pytest.mark.slow
@each_family(where=comparable)
def test_a_limit_does_not_change_the_logits_of_shorter_sequences(family: Family) -> None:
    assert difference_from_its_type(family, min(family.limits)) < 1e-4
