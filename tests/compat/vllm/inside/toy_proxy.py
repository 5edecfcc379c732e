"""Run in vLLM's environment: vLLM's toy proxy for MoRI-IO, unchanged, on two loopback ports instead of those that it has.

Its own main function listens on every address, and for registrations on a port that cannot be chosen.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys

from hypercorn.asyncio import serve
from hypercorn.config import Config


def _main(path: str, port: str, discovery_port: str) -> None:
    logging.basicConfig(level=logging.INFO)
    spec = importlib.util.spec_from_file_location("moriio_toy_proxy_server", path)
    assert spec is not None
    assert spec.loader is not None
    proxy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proxy)
    proxy.start_service_discovery("127.0.0.1", int(discovery_port))
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog = 4096
    asyncio.run(serve(proxy.app, config))


_main(*sys.argv[1:])
