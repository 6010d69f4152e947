"""Adapters to environments and tasks in the formats of other projects."""
