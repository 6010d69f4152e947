"""Journal of a rollout. It records each turn as it happens, so that a killed run can be resumed."""
