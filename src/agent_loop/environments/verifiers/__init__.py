"""Environments of the verifiers package, which run in an interpreter of their own."""
