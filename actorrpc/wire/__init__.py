"""Bytes: how messages are written, read and carried. Imports nothing of the rest of the package but its errors."""
