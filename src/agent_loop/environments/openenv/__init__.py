"""Environments behind OpenEnv servers."""
