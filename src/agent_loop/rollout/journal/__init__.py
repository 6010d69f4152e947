"""The journal of a rollout: each turn as it happens, so that a run that was killed goes on where it was."""
