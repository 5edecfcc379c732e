"""The other side of a trial or a benchmark, as a process of its own: sends a line when it is ready, then one per question."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence

from kvbaton.errors import PeerLost

__all__ = ["SourceProcess"]

_KILL_S = 10.0
_LAST_OUTPUT_BYTES = 2048
_LAST_OUTPUT_LINES = 3


class SourceProcess:
    """Runs `command`, with the number of a descriptor for its lines as the last argument, until `close`.

    Lines have a descriptor of their own because libraries print to standard output. What the process prints is kept, to be
    shown when it fails. It ends when its standard input does, and is killed `grace_s` later. Raises OSError when it cannot run.
    """

    def __init__(
        self,
        command: Sequence[str],
        grace_s: float = 0.0,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._grace_s = grace_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._lines, line = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(line)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[line, *pass_fds],
                env=environment,
            )
        except OSError:
            self._close_files()
            raise
        finally:
            os.close(line)
        self.pid = self._process.pid

    def line(self, timeout_s: float) -> bytes:
        """The next line that it sends. Raises PeerLost when it ends first, or sends none within `timeout_s`."""
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            if not select.select([self._lines], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise PeerLost(f"the other process was not ready within {timeout_s:g} s{self._last_output()}")
            part = os.read(self._lines, 1 << 16)
            if not part:
                raise PeerLost(f"the other process ended before it was ready{self._last_output()}")
            line += part
        return line

    def ask(self, question: str, timeout_s: float) -> bytes:
        """Write a line to its standard input; the line that it answers with. Raises PeerLost as `line` does."""
        assert self._process.stdin is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):  # it has ended: `line` reports that, with its last output
            self._process.stdin.write(f"{question}\n".encode())
            self._process.stdin.flush()
        return self.line(timeout_s)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace_s)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._close_files()

    def _last_output(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST_OUTPUT_BYTES))
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        return "; its last output: " + " / ".join(lines[-_LAST_OUTPUT_LINES:]) if lines else ", and printed nothing"

    def _close_files(self) -> None:
        os.close(self._lines)
        self._output.close()
