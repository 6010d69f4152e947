"""Supervised training on complete conversations and on stored trajectories. The names are imported at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_loop.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agent_loop.training.supervised.examples import Examples, load_examples
    from agent_loop.training.supervised.trainer import SupervisedTrainer

__all__ = ["Examples", "SupervisedTrainer", "load_examples"]

__getattr__ = lazy_exports(
    __name__, {"Examples": "examples", "SupervisedTrainer": "trainer", "load_examples": "examples"}
)
