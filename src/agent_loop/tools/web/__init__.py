"""Tools that send HTTP requests."""
