"""The record of what happened in a trajectory, turn by turn, from which it can be run again to the same place."""
