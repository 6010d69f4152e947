"""Local web page of a run: curves, trajectories token by token, and how each step spent its time."""
