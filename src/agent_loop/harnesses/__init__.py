"""Coding agents by name: each is a loop that runs the agent's program, as published, behind the gateway.

Needs the extra `serve`, and the program.
"""
