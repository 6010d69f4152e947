"""Supported version of SGLang."""

SUPPORTED = ">=0.5.23,<0.5.24"
"""Tested with 0.5.23. Earlier versions report no weight versions of tokens. Later versions are not tested."""
