"""Reward functions, which score trajectories."""
