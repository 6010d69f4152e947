"""Journal of a rollout: each turn as it happens, so that a run that was killed can be resumed."""
