"""What a benchmark reports: rows with a peer beside each value, the raw rounds, and the hardware it ran on."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.errors import ConfigError

__all__ = ["BenchReport", "BenchRow", "Setting", "check_at_least_one", "check_can_plot", "describe_hardware", "ratio"]

Setting = str | int | float
"""A value of the circumstances that a row or a report states."""

_BLAS_THREADS = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")


class BenchRow(msgspec.Struct, frozen=True):
    """One measured thing; `ratio` is `value` divided by what `peer` took in the same run."""

    name: str
    value: float
    unit: str
    peer: str
    ratio: float
    settings: dict[str, Setting]


class BenchReport(msgspec.Struct, frozen=True):
    """All rows of one benchmark; `rounds` holds every single measurement, by name, in the order taken.

    `problems` states what a benchmark found that must not be, such as work that did not complete; empty when all is well.
    """

    rows: list[BenchRow]
    hardware: dict[str, Setting]
    rounds: list[dict[str, list[float]]]
    problems: list[str] = msgspec.field(default_factory=list)


def describe_hardware() -> dict[str, Setting]:
    """The processor, the cores this process may use, and what NumPy computes with."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas_threads": _blas_threads(),
    }


def _cpu_model() -> str:
    fields: dict[str, str] = {}
    for line in _lines(Path("/proc/cpuinfo")):
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if "model name" in fields:
        return fields["model name"]
    return f"{platform.machine()} implementer {fields.get('CPU implementer', '?')} part {fields.get('CPU part', '?')}"


def _blas_threads() -> int:
    """Threads of the BLAS library that is loaded; 0 when that cannot be read."""
    loaded = {line.split()[-1] for line in _lines(Path("/proc/self/maps")) if "openblas" in line}
    for library in sorted(loaded):
        handle = ctypes.CDLL(library)
        for name in _BLAS_THREADS:
            if hasattr(handle, name):
                return int(getattr(handle, name)())
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def check_can_plot() -> None:
    """Raise ConfigError without matplotlib; asked before a long run, which must not end with that."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'kvbaton[plot]'") from error


def check_at_least_one(bench: object, *names: str) -> None:
    """Raise ConfigError, with the option, for one of these settings that is below 1."""
    for name in names:
        if getattr(bench, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(bench, name)}; it must be at least 1")


def ratio(value: float, other: float) -> float:
    """`value` beside `other`; 0 where there is no other."""
    return value / other if other else 0.0
