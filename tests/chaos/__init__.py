"""What breaks, how often it was tried, and what came of it.

`python -m tests.chaos` prints it as a table (docs/faults.md). Each row is also a slow test (`tests/test_chaos.py`). A
new row is a function with the decorator `table.cases` or `table.row`, in a module that `tests/chaos/rows.py` names.
"""
