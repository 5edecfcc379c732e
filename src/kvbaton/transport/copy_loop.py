"""A loop in C over runs, compiled with the system's compiler when it is first needed, and kept for later.

The library lies in a directory of this user's cache that nobody else can write to. Without a compiler there is no loop, and
`copying` does without.
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

__all__ = ["CopyCrew", "CopyLoop", "Place", "load_copy_loop"]

Place = npt.NDArray[np.uint64]
"""Where a loop is in its runs: the number of a run, and the bytes of it that are copied."""

_CODE = Path(__file__).with_name("copy_runs.c")
_OPTIONS = ("-O3", "-shared", "-fPIC", "-pthread")
_COMPILE_S = 60.0
_log = logging.getLogger("kvbaton.transport")


class CopyLoop:
    """The compiled loop; makes crews."""

    def __init__(self, library: Path) -> None:
        code = ctypes.CDLL(str(library))
        pointer, number, size = ctypes.c_void_p, ctypes.c_long, ctypes.c_uint64
        self.open_crew, self.close_crew, self.copy_runs = code.open_crew, code.close_crew, code.copy_runs
        self.open_crew.argtypes, self.open_crew.restype = [number], pointer
        self.close_crew.argtypes, self.close_crew.restype = [pointer], None
        self.copy_runs.argtypes = [pointer, pointer, pointer, pointer, number, number, number, pointer, size, size]
        self.copy_runs.restype = size


class CopyCrew:
    """Whoever copies, and so many helpers of its own, in threads that wait while there is nothing to do."""

    def __init__(self, loop: CopyLoop, helpers: int) -> None:
        self._loop = loop
        self._crew = loop.open_crew(helpers)
        if not self._crew:
            raise ConfigError("no memory for the helpers that copy between processes")

    def copy(self, target: int, source: int, runs: Runs, place: Place, most_bytes: int, most_runs: int) -> int:
        """Copy runs to a target address, from a source address, without the interpreter's lock, and move the place on.

        Tells how many bytes that were. For one thread at a time.
        """
        row, column = (stride // runs.itemsize for stride in runs.strides)
        numbers = (row, column, len(runs), place.ctypes.data, most_bytes, most_runs)
        return int(self._loop.copy_runs(self._crew, target, source, runs.ctypes.data, *numbers))

    def close(self) -> None:
        """End the helpers; nobody may be copying. Idempotent."""
        crew, self._crew = self._crew, None
        if crew:
            self._loop.close_crew(crew)


def load_copy_loop(directory: Path | None = None, compiler: str = "cc") -> CopyLoop | None:
    """The loop, from `directory` (by default a cache of this user) or compiled into it; None, with the reason in the log."""
    try:
        return CopyLoop(_library(directory or _cache(), compiler))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        _log.info("no C loop for copies between processes (%s); install a C compiler to make short runs faster", error)
        return None


def _library(directory: Path, compiler: str) -> Path:
    """The compiled file, which is named after what it was made from."""
    code = _CODE.read_bytes()
    digest = hashlib.blake2b(code + repr((_OPTIONS, platform.machine(), platform.libc_ver())).encode(), digest_size=8)
    library = directory / f"copy-runs-{digest.hexdigest()}.so"
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
        command = [found, *_OPTIONS, "-o", str(made), str(_CODE)]
        subprocess.run(command, check=True, timeout=_COMPILE_S, stdin=subprocess.DEVNULL, capture_output=True)
        made.replace(library)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbaton" / "compiled"


def _check_private(directory: Path) -> None:
    """Raise PermissionError unless only this user can put a file there: what lies there is loaded into this process."""
    state = directory.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(f"{directory} belongs to, or can be written by, somebody else")
