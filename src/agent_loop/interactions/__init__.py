"""Simulated users and environments."""
