"""Paged bytes between two processes: every transport beside what a user would pick instead, in one run."""
