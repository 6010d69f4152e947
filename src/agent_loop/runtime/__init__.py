"""How this package runs code: tasks, threads, time limits, cancellation and the code of others."""
