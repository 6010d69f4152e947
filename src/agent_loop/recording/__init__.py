"""Recording and replay of the turns of a trajectory."""
