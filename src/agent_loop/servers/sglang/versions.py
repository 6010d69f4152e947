"""Which SGLang."""

SUPPORTED = ">=0.5.23,<0.5.24"
"""Tested with 0.5.23. Earlier ones do not stamp tokens with weight versions; of later ones nothing is known."""
