"""The real routers that ours is compared and tested with, in a virtual environment of their own, made on first use and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvbaton.launch.fleet import FleetPart
from kvbaton.launch.installing import PeerEnvironment, default_cache_dir

__all__ = [
    "SGLANG_ROUTER_VERSION",
    "VLLM_ROUTER_VERSION",
    "ensure_router_peers",
    "sglang_router_part",
    "vllm_router_part",
]

VLLM_ROUTER_VERSION = "0.1.16"
"""The vllm-router that is installed, and that instances are tested under."""
SGLANG_ROUTER_VERSION = "0.3.2"
"""The sglang-router that is installed."""


def ensure_router_peers(progress: Callable[[str], None]) -> Path:
    """The environment that has the routers, installed first if need be. Raises LocalError with the last lines of pip."""
    packages = [f"vllm-router=={VLLM_ROUTER_VERSION}", f"sglang-router=={SGLANG_ROUTER_VERSION}"]
    name = f"routers-{VLLM_ROUTER_VERSION}-{SGLANG_ROUTER_VERSION}"
    environment = PeerEnvironment.named(default_cache_dir(), name)

    def install() -> None:
        environment.make(progress)
        environment.pip("installing the routers", progress, "install", *packages)

    environment.install_once("installed", "vllm-router and sglang-router", "a minute at most", progress, install)
    return environment.directory / "venv"


def vllm_router_part(
    peers: Path, port: int, discovery_port: int, metrics_port: int, *more: str, connector: str = "moriio"
) -> FleetPart:
    """A real vllm-router that finds instances as kvbaton's do register."""
    command = [str(peers / "bin" / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", connector]
    command += ["--vllm-discovery-address", f"127.0.0.1:{discovery_port}", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--policy", "round_robin", *more]
    return FleetPart("vllm-router", command, f"http://127.0.0.1:{port}/health")


def sglang_router_part(
    peers: Path, port: int, prefill_port: int, decode_port: int, metrics_port: int, bootstrap_port: int | None = None
) -> FleetPart:
    """A real sglang-router in front of two instances of this machine; `bootstrap_port` is that of the prefill instance."""
    bootstrap = "none" if bootstrap_port is None else str(bootstrap_port)
    command = [str(peers / "bin" / "python"), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prefill", f"http://127.0.0.1:{prefill_port}", bootstrap, "--decode", f"http://127.0.0.1:{decode_port}"]
    command += ["--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(metrics_port)]
    return FleetPart("sglang-router", command, f"http://127.0.0.1:{port}/readiness")
