"""vLLM's own toy proxy for MoRI-IO (`moriio_toy_proxy_server.py`), as a process of a local set-up."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_peer_sources import ensure_packages, ensure_toy_proxy
from vllm_servers import ready

from kvbaton.engines.vllm.setup.environment import VLLM_VERSION, ensure_msgpack
from kvbaton.launch.fleet import FleetPart

__all__ = ["has_registered", "toy_proxy_part"]

_PACKAGES = ("quart==0.22.0", "hypercorn==0.18.0")


def toy_proxy_part(port: int, discovery_port: int) -> FleetPart:
    """The proxy, fetched and installed first if need be."""
    environment = ready().environment
    ensure_msgpack(environment, print)
    packages = ensure_packages(environment, print, *_PACKAGES)
    proxy = ensure_toy_proxy(environment, VLLM_VERSION, print)
    script = Path(__file__).parent / "inside" / "toy_proxy.py"
    command = [str(environment.python), str(script), str(proxy), str(port), str(discovery_port)]
    variables = environment.variables()
    variables["PYTHONPATH"] = os.pathsep.join((variables["PYTHONPATH"], str(packages)))
    return FleetPart("toy-proxy", command, f"http://127.0.0.1:{port}/health", variables)


def has_registered(log: str) -> bool:
    """Whether a prefill and a decode instance are registered with it."""
    return all(f"Registered {role} instance" in log for role in ("Prefill", "Decode"))
