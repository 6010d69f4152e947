"""Modules of `bench_overhead.py`: a workload, and the sides that run it, each in its own process."""
