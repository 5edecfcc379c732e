"""The environment that SGLang's planning code runs in: a virtual environment of its own, made on first use and kept.

SGLang's package asks for gigabytes for GPUs. What is installed here is the package itself, torch for CPUs, and what its
disaggregation code imports: enough to call that code, not to serve a model.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from kvbaton.engines.base import Progress
from kvbaton.errors import LocalError
from kvbaton.launch.installing import alone, run_logged, torch_for_cpus

__all__ = ["SGLANG_VERSION", "ensure_sglang"]

SGLANG_VERSION = "0.5.23"
"""The release that benchmarks compare with."""

_SIZE_AND_TIME = "about 1.5 GB on disk, 2 to 10 minutes; only this once"
_LIMIT_S = 3600.0
_NEEDED = (
    "aiohttp msgspec numpy pyzmq requests orjson psutil setproctitle fastapi uvicorn uvloop pydantic prometheus-client tqdm "
    "packaging pillow pybase64 python-multipart regex xxhash zstandard einops IPython partial_json_parser transformers==5.19.0 "
    "tokenizers==0.23.2 sentencepiece==0.2.1 interegular tiktoken compressed-tensors==0.18.0 llguidance gguf scipy "
    "nvidia-ml-py py-spy distro watchfiles openai==2.8.0 dill apache-tvm-ffi==0.1.11"
).split()
_WITHOUT_WHAT_THEY_NEED = ("torchvision==0.28.0", "triton==3.7.0")


def ensure_sglang(directory: Path, progress: Progress, version: str = SGLANG_VERSION) -> Path:
    """The interpreter of the environment in `directory`, installed there first if need be. Raises LocalError."""
    home = directory / f"sglang-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    home.mkdir(parents=True, exist_ok=True)
    with alone(home / "lock", "installing SGLang", _LIMIT_S):
        if not (home / "installed").exists():
            progress(f"installing SGLang {version} in {home} ({_SIZE_AND_TIME})")
            _install(home, version, progress)
            (home / "installed").touch()
    return home / "venv" / "bin" / "python"


def _install(home: Path, version: str, progress: Progress) -> None:
    shutil.rmtree(home / "venv", ignore_errors=True)
    pip = [str(home / "venv" / "bin" / "python"), "-m", "pip"]
    wheels = home / "wheels"
    steps = {
        "making a virtual environment": [sys.executable, "-m", "venv", str(home / "venv")],
        "installing torch for CPUs": [*pip, "install", *torch_for_cpus()],
        f"fetching SGLang {version}": [*pip, "download", "--no-deps", "--dest", str(wheels), f"sglang=={version}"],
        f"installing {len(_NEEDED)} packages that it imports": [*pip, "install", *_NEEDED],
        "installing torchvision and triton": [*pip, "install", "--no-deps", *_WITHOUT_WHAT_THEY_NEED],
    }
    for what, command in steps.items():
        progress(f"  {what}")
        run_logged(command, home / "install.log", what, _LIMIT_S)
    found = sorted(wheels.glob(f"sglang-{version}-*.whl"))
    if not found:
        raise LocalError(f"pip has fetched no wheel of SGLang {version} into {wheels}; its log is {home / 'install.log'}")
    run_logged([*pip, "install", "--no-deps", str(found[-1])], home / "install.log", "installing SGLang itself", _LIMIT_S)
    shutil.rmtree(wheels, ignore_errors=True)
