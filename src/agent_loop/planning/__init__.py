"""Devices of the parts of a run, and the memory that they need. Loads no weights and imports no torch."""
