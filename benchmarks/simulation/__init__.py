"""Simulation of a cluster on a virtual clock: manager, pool, balancer and worker are real, servers are simulated."""
