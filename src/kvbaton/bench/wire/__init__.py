"""Paged bytes between two processes: every transport beside what a user would pick instead, in one run."""

from kvbaton.bench.wire.plot import draw
from kvbaton.bench.wire.run import WireBench, measure_wire, run_wire_bench, subjects_of

__all__ = ["WireBench", "draw", "measure_wire", "run_wire_bench", "subjects_of"]
