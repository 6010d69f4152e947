"""Scores of trajectories: pass@k and rewards with confidence intervals, per category, and compared; groups of runs."""
