"""Tools that talk HTTP."""
