"""Advantages from rewards: pure functions of tensors. B rows, R response tokens."""
