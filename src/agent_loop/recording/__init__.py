"""Record of the turns of a trajectory, from which the trajectory can be replayed."""
