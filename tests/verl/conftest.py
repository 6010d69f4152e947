from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.project import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model."""
    return save_model(tmp_path_factory.mktemp("verl"))
