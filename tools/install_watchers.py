"""Install Chromium and Prometheus from Debian, for the tests of the page and of the board: `make watchers`.

Only as root, on a system that has `apt-get`. Where that is impossible, or fails, it prints what will not be tested, and is no
error: not every machine may install packages. Not part of `make peers`: Debian's package of Prometheus starts a service where
there is one to start it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

_PROGRAMS = ("chromium", "prometheus")
_INSTALL = ("apt-get", "install", "--yes", "--no-install-recommends")
_LIMIT_S = 900.0


def install(missing: list[str]) -> str:
    """Install packages; why they are not installed, or an empty text."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    if os.geteuid() != 0:
        return "only root may install packages"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (("apt-get", "update"), (*_INSTALL, *missing)):
        try:
            done = subprocess.run(command, env=environment, timeout=_LIMIT_S, check=False, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` was not done after {_LIMIT_S:g} s"
        if done.returncode:
            return f"`{' '.join(command)}` has failed ({done.returncode})"
    left = [name for name in missing if shutil.which(name) is None]
    return f"{' and '.join(left)} cannot be found after that" if left else ""


def main() -> int:
    """Install what is missing."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    problem = install(missing) if missing else ""
    if problem:
        names = " and ".join(missing)
        result = f"== NOT TESTED: no {names} ({problem}), so their tests in `make test-e2e` will be skipped"
    else:
        result = f"== {' and '.join(_PROGRAMS)} are installed"
    sys.stdout.write(f"{result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
