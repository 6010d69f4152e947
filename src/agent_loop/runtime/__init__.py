"""Asyncio helpers: tasks, threads, time limits, and user code that hangs or raises."""
