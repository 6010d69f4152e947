"""A shopping cart."""
