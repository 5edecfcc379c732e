"""Paged bytes between two processes: every transport beside what a user would pick instead, in one run."""

from kvbaton.bench.wire.run import WireBench, run_wire_bench

__all__ = ["WireBench", "run_wire_bench"]
