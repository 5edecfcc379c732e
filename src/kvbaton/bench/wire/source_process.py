"""The source of a wire benchmark, seen from the target: a process that prints one line when it is ready."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvbaton.errors import LocalError

__all__ = ["source_process"]

_START_S = 120.0


@contextmanager
def source_process(module: str, *arguments: str) -> Iterator[tuple[bytes, int]]:
    """Run `module` for as long as the block runs; gives its first line and its pid. Raises LocalError if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None  # noqa: S101
            if not select.select([process.stdout], [], [], _START_S)[0]:
                raise LocalError(f"the source process ({module}) did not start within {_START_S:g} s")
            line = process.stdout.readline()
            if not line:
                raise LocalError(f"the source process ({module}) ended; its error is above")
            yield line, process.pid
        finally:
            process.kill()
