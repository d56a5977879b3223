"""Measurements beside other libraries: ``python -m benchmarks``, or ``python -m benchmarks.<name>``."""
