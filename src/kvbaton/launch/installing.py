"""Long work that is done once per machine, such as installing: one process at a time, its output in a log, with a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbaton.errors import LocalError

__all__ = ["alone", "run_logged"]

_KEPT_LINES = 15
_LOOK_S = 0.5


@contextlib.contextmanager
def alone(lock: Path, what: str, limit_s: float) -> Iterator[None]:
    """Hold `lock` meanwhile. Raises LocalError when somebody else is busy with `what` for longer than the limit."""
    give_up_at = time.monotonic() + limit_s
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise LocalError(f"somebody else has been {what} for {limit_s:g} s (lock {lock})") from None
                time.sleep(_LOOK_S)
        yield


def run_logged(command: Sequence[str], log: Path, what: str, limit_s: float) -> None:
    """Run a command, its output added to `log`. Raises LocalError with the last lines when it fails or takes too long."""
    with log.open("ab") as output:
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise LocalError(f"{what} has not ended after {limit_s:g} s; the log is {log}") from None
        except OSError as error:
            raise LocalError(f"{what} failed: {error}") from error
    if code:
        last = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_KEPT_LINES:])
        raise LocalError(f"{what} failed; the log is {log}, its last lines:\n{last}")
