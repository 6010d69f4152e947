"""The loader accepts a value of a setting or raises a ConfigError that names the key, the value and the remedy."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.config import Config, all_keys, load_config, parse_section
from agent_loop.errors import ConfigError
from tests.harness import examples

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@examples(300)
@given(key=st.sampled_from(all_keys(Config)) | st.text(), value=VALUES)
def test_any_tree_of_values_is_accepted_or_rejected(key: str, value: Any) -> None:
    for part in reversed(key.split(".")):
        value = {part: value}
    with suppress(ConfigError):
        parse_section(Config, value, where="settings")


@examples(300)
@given(
    key=st.sampled_from(all_keys(Config)) | st.text("abn.[]=${}\\ ", max_size=12),
    text=st.text("[]{}:,&*!?|>'\"${}#-\n\\0 ainrolut.59e", max_size=30) | st.text(max_size=12),
)
def test_any_override_is_accepted_or_rejected(key: str, text: str) -> None:
    with suppress(ConfigError):
        load_config(overrides=[f"{key}={text}"])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("rollout.temperature=inf", "rollout.temperature is 'inf': input should be a finite number"),
        ("rollout.temperature=1e-5", r"give 0 \(greedy\) or at least 0.0001"),
        ("rollout.top_k=0", r"rollout.top_k is 0: give -1 \(no limit\) or at least 1"),
        ("rollout.n=100000000000000000000", "less than or equal to 65536"),
        ("rollout.start_timeout_s=1e300", "less than or equal to 31622400"),
        ("rollout.seed=-1", "greater than or equal to 0"),
        ("actor.lr=inf", "actor.lr is 'inf': input should be a finite number"),
        ("actor.betas=[0.9, 1]", "actor.betas.1 is 1: input should be less than 1"),
        ("critic.kl_loss_coef=1", "unknown key"),
        ("trainer.run_dir=''", "trainer.run_dir is ''"),
        ("rollout=3", "rollout is 3: it is a section; set its keys, such as rollout.engine"),
        (
            "trainer.ray=none",
            "trainer.ray is 'none': it is a section; set its keys, such as trainer.ray.address",
        ),
    ],
)
def test_a_number_out_of_range_raises_an_error_with_its_range(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(overrides=[override])


def test_interpolations_can_refer_to_defaults() -> None:
    config = load_config(overrides=["rollout.trace.path=${trainer.run_dir}/traces.jsonl"])
    assert config.rollout.trace.path == "runs/train/traces.jsonl"
    config = load_config(overrides=["rollout.trace.path=${trainer.run_dir}/x", "trainer.run_dir=other"])
    assert config.rollout.trace.path == "other/x"


@pytest.mark.parametrize(
    "override",
    [
        "rollout.seed=${rollout.seed}",
        "rollout.agent=${rollout}",
        "rollout.engine_kwargs.a=${rollout.engine_kwargs}",
        "rollout.seed=${oc.env:NO_SUCH_VARIABLE_IS_SET}",
        "rollout.seed=${nothing.there}",
    ],
)
def test_a_circular_or_missing_interpolation_raises_an_error_of_one_line(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]) as raised:
        load_config(overrides=[override])
    assert "\n" not in str(raised.value)
