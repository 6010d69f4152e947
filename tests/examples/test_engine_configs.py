"""Test that an example's configurations for other engines change only the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.config import load_config

FOLDER = Path("examples/two_hop_lookup")
OTHERS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "config.yaml")


@pytest.mark.parametrize("name", OTHERS)
def test_a_configuration_for_an_engine_differs_in_the_engine_only(name: str) -> None:
    plain, other = load_config(FOLDER / "config.yaml"), load_config(FOLDER / name)
    assert other.rollout.engine == name.removesuffix(".yaml")
    engine = {"engine": other.rollout.engine, "engine_kwargs": other.rollout.engine_kwargs}
    assert other == plain.model_copy(update={"rollout": plain.rollout.model_copy(update=engine)})
