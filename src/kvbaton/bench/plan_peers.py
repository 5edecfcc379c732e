"""Planning code of others, each in a process and an environment of its own, asked for one plan at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbaton.errors import ConfigError

__all__ = ["PlanPeer"]

_SCRIPTS = Path(__file__).parent / "peers"
_IMPORT_S = 900.0
_PLAN_S = 120.0
_END_S = 10.0


class PlanPeer:
    """One script of `bench/peers/` that runs in `python`; raises ConfigError with its last line when it does not answer."""

    def __init__(self, script: str, python: Path, ask: Mapping[str, object]) -> None:
        self._script = script
        self._python = python
        self._output = b""
        self.runs: dict[str, int] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [str(python), str(_SCRIPTS / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_variables(python),
            )
        except OSError as error:
            self._errors.close()
            raise ConfigError(f"{python} cannot run {script}: {error}") from error
        try:
            about = self._question(json.dumps(ask), _IMPORT_S)
            self.plans: list[str] = about["plans"]
            self.version: str = about["version"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PlanPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def make(self, plan: str) -> float:
        """Let it make one plan; how long that took there, in seconds. How many runs it has is in `runs` afterwards."""
        answer = self._question(plan, _PLAN_S)
        self.runs[plan] = int(answer["runs"])
        return float(answer["seconds"])

    def close(self) -> None:
        """End the process. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._errors.close()

    def _question(self, line: str, timeout_s: float) -> dict[str, Any]:
        if self._process.stdin is None:
            raise ConfigError(f"{self._script} has no standard input")
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed() from error
        answer: dict[str, Any] = json.loads(self._line(timeout_s))
        return answer

    def _line(self, timeout_s: float) -> bytes:
        until = time.monotonic() + timeout_s
        output = self._process.stdout
        while b"\n" not in self._output and output is not None:
            if not select.select([output], [], [], max(0.0, until - time.monotonic()))[0]:
                raise ConfigError(f"{self._script} has not answered in {timeout_s:g} s in {self._python}; leave it out")
            part = os.read(output.fileno(), 1 << 16)
            if not part:
                raise self._failed()
            self._output += part
        line, _, self._output = self._output.partition(b"\n")
        return line

    def _failed(self) -> ConfigError:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        return ConfigError(
            f"{self._script} failed in {self._python}: {lines[-1]}; name an interpreter that has the package, or leave it out"
        )


def _variables(python: Path) -> dict[str, str]:
    """Nothing of ours on the path; where `kvbaton` made the environment, what it put beside it."""
    beside = python.parent.parent.parent / "path"
    path = {"PYTHONPATH": str(beside)} if beside.is_dir() else {}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | path | {"HF_HUB_OFFLINE": "1"}
