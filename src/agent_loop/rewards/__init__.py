"""Scoring trajectories."""
