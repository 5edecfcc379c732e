"""Sends the same requests through a P/D pair and through one instance, and says whether every answer is the same."""
