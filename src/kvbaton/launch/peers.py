"""Programs of others that kvbaton is tested with and measured against, each in an environment of its own that is made once."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbaton.core.addresses import in_url
from kvbaton.errors import LocalError
from kvbaton.launch.fleet import Part

__all__ = ["SGLANG_ROUTER", "VLLM_ROUTER", "Peer", "PeerEnvironment", "ensure_peer", "vllm_router_part"]

_STEP_S = 1800.0
_LOCK_S = 1800.0
_KEPT_LINES = 15

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Peer:
    """A release of somebody's package."""

    package: str
    version: str
    size: str
    """What installing it costs, in words."""


VLLM_ROUTER = Peer("vllm-router", "0.1.16", "about 120 MB on disk, a minute at most")
"""The router whose discovery protocol kvbaton's instances speak."""

SGLANG_ROUTER = Peer("sglang-router", "0.3.2", "about 120 MB on disk, a minute at most")
"""SGLang's router."""


@dataclass(frozen=True, slots=True)
class PeerEnvironment:
    """An installed peer; `directory` holds its virtual environment."""

    directory: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.program("python")

    def program(self, name: str) -> Path:
        """One of its commands."""
        return self.directory / "venv" / "bin" / name


def ensure_peer(directory: Path, peer: Peer, say: Say) -> PeerEnvironment:
    """The environment of `peer` below `directory`, installed first if need be. Raises LocalError with pip's last lines."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    environment = PeerEnvironment(directory / f"{peer.package}-{peer.version}-{python}")
    environment.directory.mkdir(parents=True, exist_ok=True)
    with _locked(environment.directory / "lock", peer):
        done = environment.directory / "installed"
        if not done.exists():
            say(f"installing {peer.package} {peer.version} in {environment.directory} ({peer.size}; only this once)")
            _install(environment, peer)
            done.touch()
    return environment


def vllm_router_part(
    environment: PeerEnvironment, host: str, port: int, discovery_port: int, metrics_port: int, *arguments: str
) -> Part:
    """A real vllm-router for instances that register, as its users start it for MoRI-IO."""
    command = [str(environment.program("vllm-router")), "--vllm-pd-disaggregation", "--kv-connector", "moriio"]
    command += ["--vllm-discovery-address", f"{in_url(host)}:{discovery_port}", "--host", host, "--port", str(port)]
    command += ["--policy", "round_robin", "--prometheus-host", host, "--prometheus-port", str(metrics_port), *arguments]
    return Part("vllm-router", command, f"http://{in_url(host)}:{port}/liveness")


def _install(environment: PeerEnvironment, peer: Peer) -> None:
    venv = environment.directory / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(venv)], environment.directory, "making a virtual environment")
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check"]
    package = f"{peer.package}=={peer.version}"
    _run([*pip, package], environment.directory, f"installing {package}")


def _run(command: Sequence[str], directory: Path, what: str) -> None:
    log = directory / "install.log"
    with log.open("ab") as output:
        result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=_STEP_S, check=False)
    if result.returncode:
        last = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_KEPT_LINES:])
        raise LocalError(f"{what} failed; the log is {log}, its last lines:\n{last}")


@contextlib.contextmanager
def _locked(path: Path, peer: Peer) -> Iterator[None]:
    """One installer at a time."""
    give_up_at = time.monotonic() + _LOCK_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise LocalError(
                        f"somebody else has been installing {peer.package} for {_LOCK_S:g} s (lock {path}); end that, or wait"
                    ) from None
                time.sleep(0.2)
        yield
