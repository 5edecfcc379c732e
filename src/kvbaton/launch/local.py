"""The parts of a local set-up that belong to no engine: the router, and a cluster key that all instances share."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from kvbaton.config import CLUSTER_KEY_VARIABLE, TLS_DIR_VARIABLE
from kvbaton.core.addresses import in_url
from kvbaton.launch.fleet import FleetPart

__all__ = ["kvbaton_command", "new_cluster_key", "router_part"]


def new_cluster_key() -> str:
    """A cluster key that no other set-up has."""
    return secrets.token_hex(32)


def kvbaton_command(*arguments: str) -> list[str]:
    """The command line that runs `kvbaton` with the interpreter and package of this process."""
    return [sys.executable, "-m", "kvbaton.cli.main", *arguments]


def router_part(
    host: str, port: int, discovery_port: int, *more: str, cluster_key: str | None = None, tls_dir: Path | None = None
) -> FleetPart:
    """A router for instances of this machine, of either mode: wherever it serves, registrations are only taken on loopback."""
    command = kvbaton_command("router", "--host", host, "--port", str(port), *more)
    command += ["--discovery-host", "127.0.0.1", "--discovery-port", str(discovery_port)]
    environment = {TLS_DIR_VARIABLE: "" if tls_dir is None else str(tls_dir)}
    environment |= {} if cluster_key is None else {CLUSTER_KEY_VARIABLE: cluster_key}
    return FleetPart("router", command, f"http://{in_url(host)}:{port}/health", environment)
