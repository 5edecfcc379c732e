"""Starts the processes of a small local set-up, shares the cores out, watches them, and stops them without a trace."""
