"""Checks of the package on a GPU: `make test-gpu`, or `PYTHONPATH=src python -m benchmarks.gpu`.

The program needs no pytest, no network and no model: it makes random ones. `program` runs the stages, each in a process
of its own; `stages` holds one module per stage; `verdicts` decides, prints and writes the results.
"""
