"""Supervised training on complete conversations and on stored trajectories."""

from agent_loop.training.supervised.examples import Examples, load_examples
from agent_loop.training.supervised.trainer import SupervisedTrainer

__all__ = ["Examples", "SupervisedTrainer", "load_examples"]
