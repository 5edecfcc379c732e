"""Makes the helpers in this directory importable by every test."""
