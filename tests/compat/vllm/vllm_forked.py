"""vLLM servers that are forked from one process that has imported vLLM: that import takes most of the time of a start."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from kvbaton.launch.fleet import KEPT_LOGS_VARIABLE, FleetPart, answers_ok
from watching import is_running, wait_until

__all__ = ["FORKING", "ForkedFleet"]

FORKING = Path(__file__).parent / "inside" / "forking"
_END_S = 10.0


@functools.cache
def _fork_server(python: str) -> _ForkServer:
    return _ForkServer(python)


class _ForkServer:
    """Has imported the vLLM of one interpreter when the first server asks for it; ends with this process."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def fork(self, part: FleetPart, log: Path) -> int:
        """The process id of a new server."""
        environment = {**os.environ, **part.environment, "PYTHONUNBUFFERED": "1"}
        if self._process is None:
            command = [self._python, str(FORKING / "fork_server.py")]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self._process.stdin
        assert self._process.stdout
        order = {"arguments": list(part.command)[3:], "environment": environment, "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class ForkedFleet:
    """What a `Server` needs of a `Fleet`, for one forked server."""

    def __init__(self) -> None:
        self.log_directory = Path(tempfile.mkdtemp(prefix="kvbaton-", dir=os.environ.get(KEPT_LOGS_VARIABLE)))
        self._pid = 0
        self._log = self._url = ""

    def start(self, part: FleetPart) -> None:
        """Fork it. The command line is that of a server of its own: an interpreter, `-m`, a module and the arguments."""
        assert part.command[1] == "-m"
        self._log, self._url = str(self.log_directory / f"{part.name}.log"), part.health_url
        self._pid = _fork_server(part.command[0]).fork(part, Path(self._log))

    def pid(self, _name: str) -> int:
        """Its process id."""
        return self._pid

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until it answers."""
        wait_until(lambda: self.death() is not None or answers_ok(self._url), f"{self._url} answers", timeout_s)
        assert self.death() is None, Path(self._log).read_text(errors="replace")[-3000:]

    def death(self) -> str | None:
        """That it has ended by itself."""
        return None if is_running(self._pid) else f"process {self._pid} has ended"

    def stop(self) -> None:
        """End it and what it has started, politely first."""
        with contextlib.suppress(ProcessLookupError, AssertionError):
            os.kill(self._pid, signal.SIGTERM)
            wait_until(lambda: not is_running(self._pid), "it ends", _END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if not os.environ.get(KEPT_LOGS_VARIABLE):
            shutil.rmtree(self.log_directory, ignore_errors=True)
