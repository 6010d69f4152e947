"""Workspaces in containers of Podman or Docker, through their command lines."""
