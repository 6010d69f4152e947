"""Tools: what models may call."""
