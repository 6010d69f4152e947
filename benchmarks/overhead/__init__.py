"""The parts of `bench_overhead.py`: one workload, and the sides that run it, each in a process of its own."""
