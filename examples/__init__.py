"""Programs that use actorrpc, each run with ``python -m examples.<name>``."""
