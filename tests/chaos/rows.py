"""All rows of the table, in its order."""

from tests.chaos import deaths, floods, messages, storms, strangers
from tests.chaos.table import ROWS

__all__ = ["ROWS", "deaths", "floods", "messages", "storms", "strangers"]
