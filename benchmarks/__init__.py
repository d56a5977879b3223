"""Measurements beside other libraries, each run with ``python -m benchmarks.<name>``."""
