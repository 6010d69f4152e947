"""The zoo has a sound tiny model of every causal language model that transformers can build."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.overrides import OVERRIDES
from tests.families.zoo import FAMILIES, MAX_POSITIONS, NOT_BUILT, VOCAB_SIZE, Family, each_family, token_ids

LENGTH = 40
PARAMETERS = 3_000_000
"""More than the largest model of the zoo has."""


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


@each_family("llama", "gpt2", "qwen3-window", "mamba", "llama4_text-chunk")
def test_a_tiny_model_gives_distributions_that_are_neither_flat_nor_certain(family: Family) -> None:
    check(family)


def test_every_type_of_transformers_is_built_or_named_with_the_reason() -> None:
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    missing = types - FAMILIES.keys() - NOT_BUILT.keys()
    assert not missing, f"add these types to the zoo: {sorted(missing)}"
    assert all(NOT_BUILT.values())
    assert {family.model_type for family in FAMILIES.values()} | NOT_BUILT.keys() == types


def test_overrides_and_reasons_name_types_that_exist() -> None:
    unknown = (OVERRIDES.keys() | NOT_BUILT.keys()) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not unknown, f"transformers has no such types: {sorted(unknown)}"


def test_the_weights_depend_on_the_seed_alone() -> None:
    family = FAMILIES["llama"]
    first, again, other = (
        family.build(1).state_dict(),
        family.build(1).state_dict(),
        family.build(2).state_dict(),
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_building_a_model_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    FAMILIES["llama"].build()
    assert torch.equal(torch.rand(3), expected)


def test_limits_are_shorter_than_the_tests_and_only_variants_have_them() -> None:
    for family in FAMILIES.values():
        assert all(0 < limit < 25 for limit in family.limits)
        assert not (family.limits and family.name == family.model_type)
    assert MAX_POSITIONS >= 256
