"""Tools that models can call."""
