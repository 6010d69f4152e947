"""Tests that the loader accepts a value of a setting or raises a ConfigError, and no other error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agent_loop.config import MOST, Config, ModelConfig, Section, all_keys, load_config, parse_section
from agent_loop.environments.gymnasium.world import GymnasiumSettings
from agent_loop.errors import ConfigError
from agent_loop.integrations.verl.gsm8k import Gsm8kSettings
from agent_loop.interactions.registry import InteractionEntry
from agent_loop.interactions.simulated_user import SimulatedUserSettings
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.server import embedded_config
from agent_loop.tools.mcp.tools import McpServer
from agent_loop.tools.registry import ToolEntry
from agent_loop.tools.sandbox.settings import SandboxSettings
from agent_loop.tools.search.tool import SearchConfig
from agent_loop.tools.web.http import HttpConfig
from agent_loop.tools.web.openapi import OpenApiConfig
from tests.harness import examples

HUGE = 10**4200
UNUSUAL_VALUES = [
    None,
    True,
    "",
    "x",
    "inf",
    "nan",
    "1e999",
    "\n",
    "9" * 5000,
    "${",
    "???",
    0,
    -1,
    10**20,
    -(10**20),
    HUGE,
    1 << 20_000,
    0.5,
    1e308,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    [],
    [1],
    [None],
    ["x", ["x"]],
    {},
    {"a": 1},
    {1: {"b": []}},
    (1, 2, 3),
    {"x"},
    b"x",
    date(2024, 1, 1),
    object(),
]
SECTIONS = [
    Gsm8kSettings,
    GymnasiumSettings,
    HttpConfig,
    InteractionEntry,
    McpServer,
    OpenApiConfig,
    SandboxSettings,
    SearchConfig,
    SimulatedUserSettings,
    ToolEntry,
]


def tree(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def numbers(values: Any) -> Iterator[float]:
    """Yield the numbers in all typed settings. Options of engines have no type."""
    if isinstance(values, BaseModel):
        for name, info in type(values).model_fields.items():
            if "Any" not in str(info.annotation):
                yield from numbers(getattr(values, name))
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from numbers(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from numbers(value)
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield values


def check(section: type[Section], values: dict[str, Any]) -> None:
    """Check that the values raise a ConfigError, or that all numbers are in range."""
    try:
        read = parse_section(section, values, where="settings")
    except ConfigError:
        return
    assert all(abs(number) <= (1e308 if isinstance(number, float) else MOST) for number in numbers(read))


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("section", Config.model_fields)
def test_an_unusual_value_of_any_setting_is_accepted_or_rejected(section: str) -> None:
    keys = [section, *(key for key in all_keys(Config) if key.startswith(f"{section}."))]
    for key in keys:
        for value in UNUSUAL_VALUES:
            check(Config, tree(key, value))


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unusual_value_of_any_key_of_an_entry_is_accepted_or_rejected(section: type[Section]) -> None:
    for key in all_keys(section):
        for value in UNUSUAL_VALUES:
            check(section, tree(key, value))


def test_an_unusual_option_of_the_embedded_engine_is_accepted_or_rejected() -> None:
    for name in EmbeddedConfig.__dataclass_fields__:
        for value in UNUSUAL_VALUES:
            spec = ServerSpec("embedded", model=ModelConfig(), max_model_len=64, engine_kwargs={name: value})
            with suppress(ConfigError):
                assert isinstance(getattr(embedded_config(spec), name), int | str)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@examples(300)
@given(key=st.sampled_from(all_keys(Config)) | st.text(), value=VALUES)
def test_any_tree_of_values_is_accepted_or_rejected(key: str, value: Any) -> None:
    check(Config, tree(key, value))


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
        ("rollout.temperature=.nan", "rollout.temperature is nan: input should be a finite number"),
        ("rollout.temperature=1e-5", r"give 0 \(greedy\) or at least 0.0001"),
        ("rollout.val.temperature=101", "less than or equal to 100"),
        ("rollout.top_k=0", r"rollout.top_k is 0: give -1 \(no limit\) or at least 1"),
        ("rollout.val.top_k=-2", "rollout.val.top_k is -2"),
        ("rollout.n=100000000000000000000", "less than or equal to 65536"),
        ("rollout.val.n=70000", "less than or equal to 65536"),
        ("rollout.num_servers=20000", "less than or equal to 10000"),
        ("rollout.response_length=2000000000", "less than or equal to 16777216"),
        ("rollout.start_timeout_s=1e300", "less than or equal to 31622400"),
        ("rollout.seed=-1", "greater than or equal to 0"),
        ("actor.lr=inf", "actor.lr is 'inf': input should be a finite number"),
        ("actor.lr=1e30", "less than or equal to 10"),
        ("actor.betas=[0.9, 1]", "actor.betas.1 is 1: input should be less than 1"),
        ("critic.kl_loss_coef=1", "unknown key"),
        ("reward.success_threshold=inf", "finite"),
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
