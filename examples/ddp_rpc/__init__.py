"""Data-parallel trainers with a dense part each and a sparse part on a parameter server."""
