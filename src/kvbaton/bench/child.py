"""A child process of a benchmark that answers in lines, and ends when its standard input does."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from kvbaton.errors import LocalError

__all__ = ["LineProcess"]

_END_S = 10.0


class LineProcess:
    """Starts `command`, with `options` of subprocess.Popen. Raises OSError when that cannot be run. Leaving it ends it."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        self._output = b""
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def write(self, line: str) -> None:
        """Send it a line. Raises OSError when it has ended."""
        assert self._process.stdin is not None  # noqa: S101
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def read(self, timeout_s: float) -> bytes:
        """The next line that it prints; empty once it has ended. Raises TimeoutError."""
        assert self._process.stdout is not None  # noqa: S101
        until = time.monotonic() + timeout_s
        while b"\n" not in self._output:
            if not select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"no line within {timeout_s:g} s")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                return b""
            self._output += part
        line, end, self._output = self._output.partition(b"\n")
        return line + end

    def close(self) -> None:
        """End it. Idempotent. Raises LocalError when it cannot even be killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        for last_resort in (self._process.kill, None):
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired as error:
                if last_resort is None:
                    raise LocalError(f"process {self.pid} of the benchmark does not end; look at it") from error
                last_resort()
            else:
                return
