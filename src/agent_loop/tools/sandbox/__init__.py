"""Sandboxes for untrusted code, one per trajectory."""
