"""Runs code that nobody trusts, each trajectory's shut in by itself."""
