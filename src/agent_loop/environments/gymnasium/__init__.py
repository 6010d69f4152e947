"""Gymnasium environments that are played through text: as an interaction, and as a suite of tasks."""
