"""SGLang servers that are forked from one process that has imported SGLang: that import takes most of the time of a start."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from kvbaton.launch.fleet import Fleet, FleetPart, _Running
from watching import is_running, wait_until

__all__ = ["ForkedServers"]

_SERVER = Path(__file__).parent / "inside" / "sglang_fork_server.py"
_MODULE = "sglang.launch_server"


@functools.cache
def _fork_server(python: str) -> _ForkServer:
    return _ForkServer(python)


class _ForkServer:
    """Has imported SGLang when the first server asks for it; ends with this process."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def fork(self, part: FleetPart, output: Path) -> int:
        """The process id of a new server, which prints to `output`."""
        environment = {**os.environ, **part.environment, "PYTHONUNBUFFERED": "1"}
        if self._process is None:
            pipe = subprocess.PIPE
            command = [self._python, str(_SERVER)]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self._process.stdin
        assert self._process.stdout
        order = {"arguments": list(part.command)[3:], "environment": environment, "output": str(output)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class _ForkedProcess:
    """What a fleet needs of a process, for one that is not its own child: its exit code is not known."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid = pid
        self.stdout = output.open(errors="replace")
        output.unlink()

    def poll(self) -> int | None:
        """None while it runs."""
        return None if is_running(self.pid) else 1

    def wait(self, timeout_s: float) -> int:
        """Wait until it has ended."""
        try:
            wait_until(lambda: not is_running(self.pid), f"process {self.pid} ends", timeout_s)
        except AssertionError as error:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s) from error
        return 1

    def terminate(self) -> None:
        """Ask it to end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if is_running(self.pid):
            os.kill(self.pid, number)


class ForkedServers(Fleet):
    """A fleet whose SGLang servers are forked; other parts are started as ever."""

    def _launch(self, part: FleetPart) -> _Running:
        # Metrics of several processes need a variable that is set before their library is imported.
        if list(part.command)[1:3] != ["-m", _MODULE] or "--enable-metrics" in part.command:
            return super()._launch(part)
        output = self.log_directory / f"{part.name}.pipe"
        os.mkfifo(output)
        process: Any = _ForkedProcess(_fork_server(part.command[0]).fork(part, output), output)
        return _Running(part, process, self.log_directory / f"{part.name}.log", self._on_line)
