"""Concurrent runs of many agent loops, and the batches made of their trajectories."""
