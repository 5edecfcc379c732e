"""Long work that is done once per machine, such as installing: one process at a time, its output in a log, with a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvbaton.errors import LocalError

__all__ = ["TORCH_VERSION", "alone", "default_cache_dir", "run_logged", "torch_for_cpus"]

TORCH_VERSION = "2.13.0"
"""The release of torch that engines are installed with."""

_KEPT_LINES = 15
_LOOK_S = 0.5


def default_cache_dir() -> Path:
    """`$KVBATON_CACHE`, or `~/.cache/kvbaton`."""
    return Path(os.environ.get("KVBATON_CACHE") or Path.home() / ".cache" / "kvbaton")


def torch_for_cpus() -> list[str]:
    """What pip has to be asked for. Elsewhere than on x86 the plain package is the one for CPUs."""
    if platform.machine() != "x86_64":
        return [f"torch=={TORCH_VERSION}"]
    return ["--extra-index-url", "https://download.pytorch.org/whl/cpu", f"torch=={TORCH_VERSION}+cpu"]


@contextlib.contextmanager
def alone(lock: Path, what: str, limit_s: float) -> Iterator[None]:
    """Hold `lock` meanwhile. Raises LocalError when another process is busy with `what` for longer than the limit."""
    give_up_at = time.monotonic() + limit_s
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise LocalError(f"another process has been {what} for {limit_s:g} s (lock {lock})") from None
                time.sleep(_LOOK_S)
        yield


def run_logged(
    command: Sequence[str], log: Path, what: str, limit_s: float, variables: Mapping[str, str] | None = None
) -> None:
    """Run a command, its output added to `log`; `variables` are added to its environment.

    Raises LocalError with the last lines when it fails or takes too long.
    """
    environment = {**os.environ, **(variables or {})}
    with log.open("ab") as output:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
                env=environment,
            ).returncode
        except subprocess.TimeoutExpired:
            raise LocalError(f"{what} has not ended after {limit_s:g} s; the log is {log}") from None
        except OSError as error:
            raise LocalError(f"{what} failed: {error}") from error
    if code:
        last = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_KEPT_LINES:])
        raise LocalError(f"{what} failed; the log is {log}, its last lines:\n{last}")
