"""All rows of the table, in its order."""

from tests.chaos import deaths, messages, storms, strangers
from tests.chaos.table import ROWS

__all__ = ["ROWS", "deaths", "messages", "storms", "strangers"]
