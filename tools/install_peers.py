"""Install what the long suites run against (vLLM and SGLang for CPUs, routers of others), each in its own environment."""

from __future__ import annotations

from kvbaton.engines.sglang.setup.environment import ensure_sglang
from kvbaton.engines.vllm.setup.environment import ensure_environment
from kvbaton.launch.installing import default_cache_dir
from kvbaton.launch.router_peers import ensure_router_peers

if __name__ == "__main__":
    ensure_environment(default_cache_dir(), print)
    ensure_sglang(default_cache_dir(), print)
    ensure_router_peers(print)
