"""The environment that SGLang runs in: a virtual environment of its own in the cache directory, made on first use and kept.

SGLang's package requires gigabytes for GPUs. Installed here are the package itself, torch for CPUs, and what its servers
import. What is missing on CPUs is replaced when an interpreter starts (`kvbaton.engines.sglang.cpu_build`, through
`sitecustomize`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from kvbaton.engines.base import Progress
from kvbaton.launch.installing import PeerEnvironment

__all__ = ["SGLANG_VERSION", "SglangEnvironment", "ensure_sglang"]

SGLANG_VERSION = "0.5.23"
"""The release that is installed, and that the backend is tested with."""

_SIZE_AND_TIME = "about 2.5 GB on disk, 3 to 10 minutes"
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

_SITECUSTOMIZE = "import kvbaton.engines.sglang.cpu_build as cpu_build\n\ncpu_build.replace_missing()\n"
_ENTRY_POINTS = (
    "[sglang.srt.plugins]\nkvbaton = kvbaton.engines.sglang:register\nkvbaton_mori = kvbaton.compat.mori.importing:activate\n"
)


class SglangEnvironment(PeerEnvironment):
    """An installed environment; `directory` holds the virtual environment and what goes with it."""

    @property
    def command(self) -> tuple[str, ...]:
        """What runs a server."""
        return (str(self.python), "-m", "sglang.launch_server")

    def variables(self) -> dict[str, str]:
        """Environment of an SGLang server on this machine's CPUs."""
        return super().variables() | {
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
    environment = SglangEnvironment.named(directory, f"sglang-{version}")
    environment.install_once(
        "installed-to-serve", f"SGLang {version}", _SIZE_AND_TIME, progress, lambda: _install(environment, version, progress)
    )
    environment.link_kvbaton(_ENTRY_POINTS, _SITECUSTOMIZE)
    return environment


def _install(environment: SglangEnvironment, version: str, progress: Progress) -> None:
    environment.make(progress)
    # Some of the packages would replace torch by a build for GPUs; the constraint keeps the one that is there.
    pinned = environment.directory / "constraints.txt"
    pinned.write_text(f"{environment.pip_torch(progress)}\n")
    constrained = ("install", "--constraint", str(pinned))
    wheel = environment.fetch_wheel("sglang", version, progress)
    environment.pip(f"installing {len(_NEEDED)} packages that it imports", progress, *constrained, *_NEEDED)
    environment.pip("installing torchvision and triton", progress, "install", "--no-deps", *_WITHOUT_DEPENDENCIES)
    environment.pip(
        f"installing {len(_NEEDED_TO_SERVE)} packages that servers import", progress, *constrained, *_NEEDED_TO_SERVE
    )
    environment.pip("installing SGLang itself", progress, "install", "--no-deps", str(wheel))
    shutil.rmtree(wheel.parent, ignore_errors=True)
