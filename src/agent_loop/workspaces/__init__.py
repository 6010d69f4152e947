"""Workspaces of trajectories: a folder, a git repository or a container in which programs and tools work."""
