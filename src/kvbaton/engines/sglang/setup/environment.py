"""The environment that SGLang runs in: a virtual environment of its own in the cache directory, made on first use and kept.

SGLang's package requires gigabytes for GPUs. Installed here are the package itself, torch for CPUs, and what its servers
import. What is missing on CPUs is replaced when an interpreter starts (`kvbaton.engines.sglang.cpu_build`, through
`sitecustomize`). kvbaton is not installed: a directory on the import path links to this very checkout and names its entry
point.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kvbaton
from kvbaton.engines.base import Progress
from kvbaton.errors import LocalError
from kvbaton.launch.installing import TORCH_VERSION, alone, run_logged, torch_for_cpus

__all__ = ["NIXL_VERSION", "SGLANG_VERSION", "SglangEnvironment", "ensure_nixl", "ensure_sglang"]

SGLANG_VERSION = "0.5.23"
"""The release that is installed, and that the backend is tested with."""

NIXL_VERSION = "1.5.1"
"""The release of NIXL that benchmarks compare with."""

_SIZE_AND_TIME = "about 2.5 GB on disk, 3 to 10 minutes; only this once"
_LIMIT_S = 3600.0
_NEEDED = (
    "aiohttp msgspec numpy pyzmq requests orjson psutil setproctitle fastapi uvicorn uvloop pydantic prometheus-client tqdm "
    "packaging pillow pybase64 python-multipart regex xxhash zstandard einops IPython partial_json_parser transformers==5.19.0 "
    "tokenizers==0.23.2 sentencepiece==0.2.1 interegular tiktoken compressed-tensors==0.18.0 llguidance gguf scipy "
    "nvidia-ml-py py-spy distro watchfiles openai==2.8.0 dill apache-tvm-ffi==0.1.11"
).split()
_NEEDED_TO_SERVE = (
    "jsonschema openai-harmony==0.0.4 modelscope mistral_common anthropic soundfile==0.13.1 xgrammar==0.2.7 accelerate"
).split()
_WITHOUT_DEPENDENCIES = ("torchvision==0.28.0", "triton==3.7.0")

_PACKAGE = Path(kvbaton.__file__).parent
_SITECUSTOMIZE = "import kvbaton.engines.sglang.cpu_build as cpu_build\n\ncpu_build.replace_missing()\n"
_ENTRY_POINTS = (
    "[sglang.srt.plugins]\nkvbaton = kvbaton.engines.sglang:register\nkvbaton_mori = kvbaton.compat.mori.importing:activate\n"
)


@dataclass(frozen=True, slots=True)
class SglangEnvironment:
    """An installed environment; `directory` holds the virtual environment and what goes with it."""

    directory: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "venv" / "bin" / "python"

    @property
    def command(self) -> tuple[str, ...]:
        """What runs a server."""
        return (str(self.python), "-m", "sglang.launch_server")

    @property
    def kvbaton_path(self) -> Path:
        """A directory with this very kvbaton in it, and nothing else of where it is installed; each checkout has its own."""
        digest = hashlib.blake2b(str(_PACKAGE).encode(), digest_size=6).hexdigest()
        return self.directory / "links" / digest

    def variables(self) -> dict[str, str]:
        """Environment of an SGLang server on this machine's CPUs that reaches no hub, and finds this very kvbaton."""
        return {
            "PYTHONPATH": str(self.kvbaton_path),
            "PYTHONPYCACHEPREFIX": str(self.directory / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_HOST_IP": "127.0.0.1",
            "HOST_IP": "127.0.0.1",
            "SGLANG_LOCAL_IP_NIC": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
            # With several ranks SGLang compiles its embedding at the first request, for longer than its health check waits.
            "TORCHDYNAMO_DISABLE": "1",
        }


def ensure_sglang(directory: Path, progress: Progress, version: str = SGLANG_VERSION) -> SglangEnvironment:
    """The environment in `directory`, installed there first if need be. Raises LocalError with the last lines of pip."""
    name = f"sglang-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    environment = SglangEnvironment(directory / name)
    environment.directory.mkdir(parents=True, exist_ok=True)
    with alone(environment.directory / "lock", "installing SGLang", _LIMIT_S):
        done = environment.directory / "installed-to-serve"
        if not done.exists():
            progress(f"installing SGLang {version} in {environment.directory} ({_SIZE_AND_TIME})")
            _install(environment, version, progress)
            done.touch()
        _link_kvbaton(environment.kvbaton_path)
    return environment


def ensure_nixl(environment: SglangEnvironment, progress: Progress, version: str = NIXL_VERSION) -> None:
    """NIXL beside SGLang, installed there first if need be; without what it would pull in for GPUs."""
    with alone(environment.directory / "lock", "installing SGLang", _LIMIT_S):
        done = environment.directory / f"nixl-{version}-installed"
        if not done.exists():
            progress(f"installing NIXL {version} in {environment.directory} (about 230 MB, a minute at most; only this once)")
            packages = [f"nixl=={version}", f"nixl-cu12=={version}"]
            pip = [str(environment.python), "-m", "pip", "install", "--no-deps"]
            _run([*pip, *packages], environment.directory, "installing NIXL", progress)
            done.touch()


def _install(environment: SglangEnvironment, version: str, progress: Progress) -> None:
    home = environment.directory
    shutil.rmtree(home / "venv", ignore_errors=True)
    pip = [str(environment.python), "-m", "pip"]
    wheels = home / "wheels"
    # Some of the packages would replace torch by a build for GPUs; the constraint keeps the one that is there.
    pinned = home / "constraints.txt"
    pinned.write_text(f"{torch_for_cpus()[-1]}\n")
    constrained = [*pip, "install", "--constraint", str(pinned)]
    steps = {
        "making a virtual environment": [sys.executable, "-m", "venv", str(home / "venv")],
        f"installing torch {TORCH_VERSION} for CPUs": [*pip, "install", *torch_for_cpus()],
        f"fetching SGLang {version}": [*pip, "download", "--no-deps", "--dest", str(wheels), f"sglang=={version}"],
        f"installing {len(_NEEDED)} packages that it imports": [*constrained, *_NEEDED],
        "installing torchvision and triton": [*pip, "install", "--no-deps", *_WITHOUT_DEPENDENCIES],
        f"installing {len(_NEEDED_TO_SERVE)} packages that servers import": [*constrained, *_NEEDED_TO_SERVE],
    }
    for what, command in steps.items():
        _run(command, home, what, progress)
    found = sorted(wheels.glob(f"sglang-{version}-*.whl"))
    if not found:
        raise LocalError(f"pip has fetched no wheel of SGLang {version} into {wheels}; its log is {home / 'install.log'}")
    _run([*pip, "install", "--no-deps", str(found[-1])], home, "installing SGLang itself", progress)
    shutil.rmtree(wheels, ignore_errors=True)


def _link_kvbaton(directory: Path) -> None:
    """Make this kvbaton importable from `directory`, with its entry point, and have interpreters prepare for CPUs."""
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "kvbaton"
    if not link.is_symlink() or link.readlink() != _PACKAGE:
        fresh = directory / f".kvbaton-{os.getpid()}"
        fresh.symlink_to(_PACKAGE)
        fresh.replace(link)
    metadata = directory / f"kvbaton-{kvbaton.__version__}.dist-info"
    metadata.mkdir(exist_ok=True)
    _write(metadata / "METADATA", f"Metadata-Version: 2.1\nName: kvbaton\nVersion: {kvbaton.__version__}\n")
    _write(metadata / "entry_points.txt", _ENTRY_POINTS)
    _write(directory / "sitecustomize.py", _SITECUSTOMIZE)


def _write(path: Path, text: str) -> None:
    """Replace a file at once: a server that is starting may be reading it."""
    if not path.exists() or path.read_text() != text:
        fresh = path.with_name(f".{path.name}-{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(path)


def _run(command: Sequence[str], directory: Path, what: str, progress: Progress) -> None:
    progress(f"  {what}")
    run_logged(command, directory / "install.log", what, _LIMIT_S)
