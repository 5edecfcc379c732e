"""Sends the same requests through a P/D pair and through one instance, and reports whether every answer is the same."""
