"""Supervised training on complete conversations and on stored trajectories."""
