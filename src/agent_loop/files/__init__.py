"""Kinds of files, and validated YAML and JSON from users."""
