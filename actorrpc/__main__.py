"""`python -m actorrpc`: the command line."""

from __future__ import annotations

import sys

from actorrpc.commands import main

if __name__ == "__main__":
    sys.exit(main())
