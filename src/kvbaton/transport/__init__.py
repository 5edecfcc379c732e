"""Transports, which move runs of bytes between two ranks: `base` is the contract, `table` has one entry for each."""
