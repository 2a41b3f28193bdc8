"""Fuzzing of everything that reads what others wrote; `python -m benchmarks.fuzz --help`."""
