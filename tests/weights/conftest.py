from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.weights.receiving import Receiver, blocks, start_child, start_unrelated


@pytest.fixture(scope="session")
def receivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Receiver]]:
    """Start two receivers: receiver 0 is a multiprocessing child, receiver 1 an unrelated process."""
    errors = tmp_path_factory.mktemp("receivers") / "stderr.txt"
    both = [start_child(0), start_unrelated(1, errors=errors)]
    with ExitStack() as stack:
        yield both
        for receiver in both:
            stack.callback(receiver.end)
    assert errors.read_text() == ""


@pytest.fixture(autouse=True)
def _no_block_is_left() -> Iterator[None]:
    before = blocks()
    yield
    assert blocks() <= before
