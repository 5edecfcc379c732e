"""A few threads that share one job: NumPy lets go of the interpreter while it computes, so parts really run at once."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable

__all__ = ["Team", "default_team_size"]

_LONGEST_PART_S = 600.0


def default_team_size() -> int:
    """As many threads as the matrix products use: `OPENBLAS_NUM_THREADS` or `OMP_NUM_THREADS`, else one per usable core."""
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(variable, "")
        if value.isascii() and value.isdigit() and int(value) > 0:
            return min(int(value), 64)
    return min(len(os.sched_getaffinity(0)), 64)


class Team:
    """`size` members, the caller among them. One caller at a time; idle members cost nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._helpers = concurrent.futures.ThreadPoolExecutor(size - 1, "kvbaton-team") if size > 1 else None

    def split(self, count: int, job: Callable[[int, int, int], None], smallest: int = 1) -> None:
        """Call `job(member, first, stop)` for parts of `range(count)`, none below `smallest`; return when all are done."""
        parts = min(self.size, count // smallest)
        if parts < 2 or self._helpers is None:
            job(0, 0, count)
            return
        bounds = [count * part // parts for part in range(parts + 1)]
        futures = [self._helpers.submit(job, part, bounds[part], bounds[part + 1]) for part in range(1, parts)]
        try:
            job(0, 0, bounds[1])
        finally:
            concurrent.futures.wait(futures, _LONGEST_PART_S)
        for future in futures:
            future.result(0)
