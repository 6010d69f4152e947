"""Local web page of a run: metric curves, trajectories token by token, and the time line of each step."""
