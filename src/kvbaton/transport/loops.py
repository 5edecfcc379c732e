"""Loops in C over runs, compiled with the system's compiler when they are first needed, and kept for later.

The library lies in a directory of this user's cache that no other user can write to. Without a compiler there are no loops, and
`copying` and `runs` do without.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Runs

__all__ = ["CopyCrew", "Loops", "Place", "load_loops"]

Place = npt.NDArray[np.uint64]
"""Where a loop is in its runs: the number of a run, and the bytes of it that are copied."""

_CODE = tuple(Path(__file__).with_name(name) for name in ("check_runs.c", "copy_runs.c"))
_OPTIONS = ("-O3", "-shared", "-fPIC", "-pthread")
_COMPILE_S = 60.0
_log = logging.getLogger("kvbaton.transport")


class Loops:
    """The compiled loops."""

    def __init__(self, library: Path) -> None:
        code = ctypes.CDLL(str(library))
        pointer, number, size = ctypes.c_void_p, ctypes.c_long, ctypes.c_uint64
        self.open_crew, self.close_crew, self.copy_runs = code.open_crew, code.close_crew, code.copy_runs
        self.open_crew.argtypes, self.open_crew.restype = [number], pointer
        self.close_crew.argtypes, self.close_crew.restype = [pointer], None
        self.copy_runs.argtypes = [pointer, pointer, pointer, pointer, number, number, number, pointer, size, size]
        self.copy_runs.restype = size
        self._check_runs = code.check_runs
        self._check_runs.argtypes = [pointer, number, number, number, size, size, pointer]

    def checked(self, runs: Runs, source_bytes: int, target_bytes: int) -> Runs | None:
        """A copy of `runs`, each column in one piece, when all lie inside both regions and no two targets overlap.

        None when that is not so, or not seen in one pass: an empty run, targets of several sizes in no order.
        """
        if not runs.flags.aligned:
            return None
        own = np.empty(runs.shape, np.uint64, order="F")
        row, column = (stride // runs.itemsize for stride in runs.strides)
        numbers = (row, column, len(runs), source_bytes, target_bytes)
        return own if self._check_runs(runs.ctypes.data, *numbers, own.ctypes.data) else None


class CopyCrew:
    """The thread that copies, and so many helpers of its own, in threads that wait while there is nothing to do."""

    def __init__(self, loops: Loops, helpers: int) -> None:
        self._loops = loops
        self._crew = loops.open_crew(helpers)
        if not self._crew:
            raise ConfigError("no memory for the helpers that copy between processes")

    def copy(self, target: int, source: int, runs: Runs, place: Place, most_bytes: int, most_runs: int) -> int:
        """Copy runs to a target address, from a source address, without the interpreter's lock, and move the place on.

        Returns how many bytes that were. For one thread at a time.
        """
        row, column = (stride // runs.itemsize for stride in runs.strides)
        numbers = (row, column, len(runs), place.ctypes.data, most_bytes, most_runs)
        return int(self._loops.copy_runs(self._crew, target, source, runs.ctypes.data, *numbers))

    def close(self) -> None:
        """End the helpers; no copy may be running. Idempotent."""
        crew, self._crew = self._crew, None
        if crew:
            self._loops.close_crew(crew)


def load_loops(directory: Path | None = None, compiler: str = "cc") -> Loops | None:
    """The loops, from `directory` (by default a cache of this user) or compiled into it; None, with the reason in the log."""
    try:
        return Loops(_library(directory or _cache(), compiler))
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        _log.info("no loops in C over runs (%s); install a C compiler to make short runs faster", error)
        return None


def _library(directory: Path, compiler: str) -> Path:
    """The compiled file, which is named after what it was made from."""
    code = b"".join(file.read_bytes() for file in _CODE)
    digest = hashlib.blake2b(code + repr((_OPTIONS, platform.machine(), platform.libc_ver())).encode(), digest_size=8)
    library = directory / f"loops-{digest.hexdigest()}.so"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(directory)
    if not library.exists():
        _compile(library, compiler)
    return library


def _compile(library: Path, compiler: str) -> None:
    found = shutil.which(compiler)
    if found is None:
        raise FileNotFoundError(f"there is no {compiler}")
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        made = Path(place) / library.name
        command = [found, *_OPTIONS, "-o", str(made), *map(str, _CODE)]
        subprocess.run(command, check=True, timeout=_COMPILE_S, stdin=subprocess.DEVNULL, capture_output=True)
        made.replace(library)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbaton" / "compiled"


def _check_private(directory: Path) -> None:
    """Raise PermissionError unless only this user can put a file there: what lies there is loaded into this process."""
    state = directory.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to, or can be written by, another user")
