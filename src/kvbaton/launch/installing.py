"""Long work that is done once per machine, such as installing: one process at a time, its output in a log, with a deadline.

Other engines and routers run in a virtual environment of their own (`PeerEnvironment`): they pin their packages, and few of
ours are needed there. kvbaton is not installed in it: a directory on the import path links to this very checkout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import kvbaton
from kvbaton.errors import LocalError

__all__ = [
    "NIXL_VERSION",
    "TORCH_VERSION",
    "PeerEnvironment",
    "alone",
    "default_cache_dir",
    "do_once",
    "ensure_nixl",
    "run_logged",
]

TORCH_VERSION = "2.13.0"
"""The release of torch that engines are installed with."""

NIXL_VERSION = "1.5.1"
"""The release of NIXL that benchmarks compare with."""

_KEPT_LINES = 15
_LOOK_S = 0.5
_INSTALL_S = 3600.0
_PACKAGE = Path(kvbaton.__file__).parent


def default_cache_dir() -> Path:
    """`$KVBATON_CACHE`, or `~/.cache/kvbaton`."""
    return Path(os.environ.get("KVBATON_CACHE") or Path.home() / ".cache" / "kvbaton")


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


def do_once(mark: Path, doing: str, limit_s: float, work: Callable[[], None]) -> None:
    """Call `work` unless it has succeeded before, which the file `mark` states; one process of this machine at a time."""
    mark.parent.mkdir(parents=True, exist_ok=True)
    with alone(mark.parent / "lock", doing, limit_s):
        if not mark.exists():
            work()
            mark.touch()


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


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """A virtual environment in a directory of its own, made on first use and kept. What fails raises LocalError."""

    directory: Path

    @classmethod
    def named(cls, parent: Path, name: str) -> Self:
        """The environment `name` in `parent`, for the Python that runs this."""
        return cls(parent / f"{name}-py{sys.version_info.major}{sys.version_info.minor}")

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "venv" / "bin" / "python"

    @property
    def kvbaton_path(self) -> Path:
        """A directory with this very kvbaton in it, and nothing else of where it is installed; each checkout has its own."""
        digest = hashlib.blake2b(str(_PACKAGE).encode(), digest_size=6).hexdigest()
        return self.directory / "links" / digest

    def variables(self) -> dict[str, str]:
        """What its processes need in their environment: they find this very kvbaton, and reach no hub."""
        return {
            "PYTHONPATH": str(self.kvbaton_path),
            "PYTHONPYCACHEPREFIX": str(self.directory / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }

    def install_once(self, mark: str, what: str, cost: str, progress: Callable[[str], None], work: Callable[[], None]) -> None:
        """Have `work` install something, unless the file `mark` states that it was done; `cost` is shown before."""

        def install() -> None:
            progress(f"installing {what} in {self.directory} ({cost}; only this once)")
            work()

        do_once(self.directory / mark, f"installing {what}", _INSTALL_S, install)

    def make(self, progress: Callable[[str], None]) -> None:
        """Make it anew, with no packages."""
        shutil.rmtree(self.directory / "venv", ignore_errors=True)
        self._run("making a virtual environment", progress, sys.executable, "-m", "venv", str(self.directory / "venv"))

    def pip(self, what: str, progress: Callable[[str], None], *arguments: str) -> None:
        """Run pip in it."""
        self._run(what, progress, str(self.python), "-m", "pip", *arguments)

    def pip_torch(self, progress: Callable[[str], None]) -> str:
        """Install torch for CPUs; returns what pins that build. Elsewhere than on x86 the plain package is the one for CPUs."""
        index, pin = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"], f"torch=={TORCH_VERSION}+cpu"
        if platform.machine() != "x86_64":
            index, pin = [], f"torch=={TORCH_VERSION}"
        self.pip(f"installing torch {TORCH_VERSION} for CPUs", progress, "install", *index, pin)
        return pin

    def fetch_wheel(self, package: str, version: str, progress: Callable[[str], None]) -> Path:
        """Fetch the wheel of a package alone. The caller removes its directory."""
        wheels = self.directory / "wheels"
        pinned = f"{package}=={version}"
        self.pip(f"fetching {pinned}", progress, "download", "--no-deps", "--dest", str(wheels), pinned)
        found = sorted(wheels.glob(f"{package.replace('-', '_')}-{version}-*.whl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise LocalError(f"pip has fetched no wheel of {pinned} into {wheels}; its log is {self.directory / 'install.log'}")
        return found[-1]

    def link_kvbaton(self, entry_points: str, sitecustomize: str = "") -> None:
        """Make this kvbaton importable from `kvbaton_path`, with entry points, and what interpreters run when they start."""
        self.kvbaton_path.mkdir(parents=True, exist_ok=True)
        link = self.kvbaton_path / "kvbaton"
        if not link.is_symlink() or link.readlink() != _PACKAGE:
            fresh = link.with_name(f".kvbaton-{os.getpid()}")
            fresh.symlink_to(_PACKAGE)
            fresh.replace(link)
        metadata = self.kvbaton_path / f"kvbaton-{kvbaton.__version__}.dist-info"
        metadata.mkdir(exist_ok=True)
        _replace_text(metadata / "METADATA", f"Metadata-Version: 2.1\nName: kvbaton\nVersion: {kvbaton.__version__}\n")
        _replace_text(metadata / "entry_points.txt", entry_points)
        if sitecustomize:
            _replace_text(self.kvbaton_path / "sitecustomize.py", sitecustomize)

    def _run(self, what: str, progress: Callable[[str], None], *command: str) -> None:
        progress(f"  {what}")
        run_logged(command, self.directory / "install.log", what, _INSTALL_S)


def ensure_nixl(environment: PeerEnvironment, progress: Callable[[str], None], version: str = NIXL_VERSION) -> None:
    """NIXL beside an engine, installed there first if need be; without what it would pull in for GPUs."""
    packages = [f"nixl=={version}", f"nixl-cu12=={version}"]
    environment.install_once(
        f"nixl-{version}-installed",
        f"NIXL {version}",
        "about 230 MB, a minute at most",
        progress,
        lambda: environment.pip("installing NIXL", progress, "install", "--no-deps", *packages),
    )


def _replace_text(path: Path, text: str) -> None:
    """Replace a file at once: a server that is starting may be reading it."""
    if not path.exists() or path.read_text() != text:
        fresh = path.with_name(f".{path.name}-{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(path)
