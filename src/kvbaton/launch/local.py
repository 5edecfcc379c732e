"""The usual local set-up as parts: a router, prefill and decode instances, and single instances to compare with."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvbaton.config import CLUSTER_KEY_VARIABLE, DEFAULT_HANDOFF, HandoffSettings
from kvbaton.core.addresses import in_url
from kvbaton.launch.fleet import Part, core_share
from kvbaton.launch.ports import PortPicker

__all__ = ["InstanceOptions", "instance_part", "kvbaton_command", "new_cluster_key", "pair_parts", "router_part"]


def new_cluster_key() -> str:
    """A cluster key that nobody else knows."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """What every embedded instance of a set-up has in common."""

    model: str
    transport: str
    engines: int
    """How many engines share the cores of this machine."""
    extra: tuple[str, ...] = ()
    """More arguments for `kvbaton serve`."""
    cluster_key: str = field(default_factory=new_cluster_key, repr=False)
    """Lets the instances of this set-up know each other; travels in the environment, because everybody can read commands."""
    handoff: HandoffSettings = DEFAULT_HANDOFF
    """How the instances hand over."""
    shape: str = "tp1"
    """How the instances are cut."""


def kvbaton_command(*arguments: str) -> list[str]:
    """The command line that runs `kvbaton` with the interpreter and package of this process."""
    return [sys.executable, "-m", "kvbaton.cli.main", *arguments]


def router_part(
    host: str, port: int, discovery_port: int, health_path: str = "/health", cluster_key: str | None = None
) -> Part:
    """A router for instances of this machine, of either mode: wherever it serves, registrations are only taken on loopback."""
    command = kvbaton_command("router", "--host", host, "--port", str(port))
    command += ["--discovery-host", "127.0.0.1", "--discovery-port", str(discovery_port)]
    environment = {} if cluster_key is None else {CLUSTER_KEY_VARIABLE: cluster_key}
    return Part("router", command, f"http://{in_url(host)}:{port}{health_path}", environment)


def instance_part(
    name: str, role: str, options: InstanceOptions, ports: PortPicker, routers: Sequence[str] = ()
) -> tuple[Part, str]:
    """One embedded instance on free loopback ports, and its base URL."""
    port = ports.pick()
    command = kvbaton_command("serve", "--role", role, "--model", options.model, "--port", str(port))
    command += ["--control-port", str(ports.pick()), "--transport", options.transport]
    for router in routers:
        command += ["--router", router]
    for setting, value in msgspec.structs.asdict(options.handoff).items():
        option = f"--{setting.replace('_', '-')}"
        command += [option] * value if isinstance(value, bool) else [option, value]
    command += [*options.extra, *(("--shape", options.shape) if options.shape != "tp1" else ())]
    url = f"http://127.0.0.1:{port}"
    environment = core_share(options.engines) | {CLUSTER_KEY_VARIABLE: options.cluster_key}
    return Part(name, command, f"{url}/health", environment), url


def pair_parts(
    prefill: int,
    decode: int,
    options: InstanceOptions,
    ports: PortPicker,
    discovery_port: int,
    decode_options: InstanceOptions | None = None,
) -> list[Part]:
    """`prefill` prefill and `decode` decode instances that register with the router at `discovery_port`.

    Decode instances have options of their own where those are given.
    """
    routers = [f"127.0.0.1:{discovery_port}"]
    return [
        instance_part(f"{role}-{index}", role, own, ports, routers)[0]
        for role, count, own in (("prefill", prefill, options), ("decode", decode, decode_options or options))
        for index in range(count)
    ]
