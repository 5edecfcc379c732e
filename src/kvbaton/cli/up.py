"""`kvbaton up`: a router, prefill and decode instances on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from functools import partial
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console
from rich.panel import Panel

from kvbaton.cli.options import EngineName, HandoffOptions, ModelName, TransportName, set_up_tls
from kvbaton.cli.output import SafeOutput
from kvbaton.cli.running import end_like_ctrl_c
from kvbaton.config import DEFAULT_HANDOFF
from kvbaton.core.addresses import in_url
from kvbaton.engines.table import DEFAULT_ENGINE
from kvbaton.launch.restarts import DEFAULT_RESTARTS, RestartPolicy, RestartSchedule

if TYPE_CHECKING:
    from kvbaton.engines.base import EngineOptions
    from kvbaton.launch.fleet import Fleet

__all__ = ["up"]

_LAST_OUTPUT_S = 1.0
_SHOWN = ("WARNING", "ERROR", "CRITICAL", "Traceback")


def up(
    *,
    engine: EngineName = DEFAULT_ENGINE,
    prefill: int = 1,
    decode: int = 1,
    model: ModelName = "smollm2",
    prefill_shape: str = "tp1",
    decode_shape: str = "tp1",
    transport: TransportName = "local",
    host: str = "127.0.0.1",
    port: int = 8000,
    handoff: HandoffOptions = DEFAULT_HANDOFF,
    restarts: int = DEFAULT_RESTARTS,
    ray: bool = False,
    encrypt: bool = False,
    verbose: bool = False,
) -> int:
    """Start a router, prefill and decode instances on this machine, and a chat page to use them.

    The instances share a cluster key: that of KVBATON_CLUSTER_KEY if it is set, else a new one.
    A part that dies once all were healthy is restarted on the same ports, after 1 s, then 2 s, up to 30 s.

    Parameters
    ----------
    prefill
        how many prefill instances.
    decode
        how many decode instances.
    prefill_shape
        how the prefill instances are cut into ranks: `tp2`, `pp2,tp2`, ...; not every model and engine can be.
    decode_shape
        how the decode instances are cut.
    host
        where the router listens.
    port
        port of the router.
    restarts
        how often one part may be restarted within 10 minutes; one more death ends all parts, with exit code 1. 0: never.
    ray
        run the parts as replicas of Ray Serve, on the cluster that RAY_ADDRESS names or a new one of this machine; Serve
        restarts what dies. `host` and `port` are those of Serve. Needs the extra `ray`.
    encrypt
        encrypt every connection between the parts, with the certificates of KVBATON_TLS_DIR if it is set, else with new ones.
    verbose
        show everything that the parts log.
    """
    from kvbaton.config import CLUSTER_KEY_VARIABLE, TLS_DIR_VARIABLE, parse_trust
    from kvbaton.engines.base import EngineOptions, pair_parts
    from kvbaton.engines.table import find_engine
    from kvbaton.errors import ConfigError
    from kvbaton.launch.fleet import Fleet
    from kvbaton.launch.local import new_cluster_key, router_part
    from kvbaton.launch.ports import PortPicker, check_port_free
    from kvbaton.transport.choose import check_writes

    for name, count in (("--prefill", prefill), ("--decode", decode)):
        if count < 1:
            raise ConfigError(f"{name} is {count}; at least one instance of each kind is needed")
    if restarts < 0:
        raise ConfigError(f"--restarts is {restarts}; it must be how often a part may be restarted, or 0 for never")
    check_writes(transport, handoff.unfenced_writes, handoff.fenced_writes)
    check_port_free(host, port, "--port")
    if ray and (encrypt or os.environ.get(TLS_DIR_VARIABLE)):
        raise ConfigError(
            f"--encrypt, or {TLS_DIR_VARIABLE}, with --ray: replicas of Ray are not encrypted so far; leave one out"
        )
    tls_dir = set_up_tls(parse_trust(None, os.environ), encrypt=encrypt)
    plugin = find_engine(engine)
    cluster_key = os.environ.get(CLUSTER_KEY_VARIABLE) or new_cluster_key()
    options = EngineOptions(model, transport, prefill + decode, handoff, cluster_key=cluster_key, tls_dir=tls_dir)
    sides = [replace(options, shape=shape) for shape in (prefill_shape, decode_shape)]
    for side in sides:
        plugin.check_support(side)
    with SafeOutput() as output:
        console = Console(file=cast("IO[str]", output))
        progress = partial(console.print, style="dim", highlight=False, markup=False, soft_wrap=True)
        served = plugin.check(sides[0], sides[1], progress).name
        if ray:
            counted = [(prefill, prefill_shape), (decode, decode_shape)]
            return _up_on_ray(console, engine, replace(options, served_name=served), counted, host, port)
        prepared = [plugin.prepare(replace(side, served_name=served), progress) for side in sides]
        ports = PortPicker()
        discovery_port = ports.pick()
        end_like_ctrl_c()
        if plugin.start_notice:
            progress(plugin.start_notice)
        started = time.monotonic()
        with Fleet(lambda name, line: _show_line(console, name, line, verbose)) as fleet:
            try:
                fleet.start(router_part(host, port, discovery_port, cluster_key=cluster_key, tls_dir=tls_dir))
                for part in pair_parts(prepared[0], prepared[1], (prefill, decode), ports, discovery_port):
                    fleet.start(part)
                fleet.wait_healthy(plugin.healthy_within_s, lambda name: console.print(f"  [green]✓[/] {name} is healthy"))
                _welcome(console, host, port, served, time.monotonic() - started)
                return _watch(fleet, RestartPolicy(restarts), plugin.healthy_within_s, console)
            except KeyboardInterrupt:
                console.print("\nstopping; nothing will be left behind")
                return 0


def _up_on_ray(
    console: Console, engine: str, options: EngineOptions, sides: list[tuple[int, str]], host: str, port: int
) -> int:
    """Run the parts as replicas of Ray Serve until Ctrl-C."""
    from kvbaton.deploy.ray import RaySettings, ReplicaSettings, serve_until_interrupted
    from kvbaton.transport.table import transport_entry

    shared = {"sharing": options.sharing, "handoff": asdict(options.handoff), "served_name": options.served_name}
    # Replicas may be on different machines, which share no memory; what Ray gets by default crosses hosts.
    if transport_entry(options.transport).crosses_hosts:
        shared["transport"] = options.transport
    prefill, decode = (ReplicaSettings(least=count, engine={"shape": shape}) for count, shape in sides)
    settings = RaySettings(options.model, engine, prefill, decode, options=shared)
    end_like_ctrl_c()
    started = time.monotonic()
    ready = partial(_welcome, console, host, port, options.served_name)
    serve_until_interrupted(settings, host, port, lambda: ready(time.monotonic() - started))
    return 0


def _watch(fleet: Fleet, policy: RestartPolicy, healthy_within_s: float, console: Console) -> int:
    """Restart parts until one died too often; the survivors get a moment to answer their clients."""
    from kvbaton.launch.supervisor import Supervisor

    report = partial(console.print, style="yellow", highlight=False, markup=False, soft_wrap=True)
    death = Supervisor(fleet, RestartSchedule(policy), healthy_within_s, report).watch()
    often = f"; restarts within {policy.window_s / 60:g} minutes: {policy.limit} of {policy.limit}" if policy.limit else ""
    console.print(f"[bold red]{death}[/]{often}; stopping the others", highlight=False, soft_wrap=True)
    for line in death.last_lines[-5:]:
        console.print(f"  {death.name} | {line}", markup=False, highlight=False, style="dim")
    if policy.limit:
        advice = "--verbose shows all of its output: fix the cause and start again (--restarts N allows more)"
        console.print(advice, markup=False, highlight=False, soft_wrap=True)
    time.sleep(_LAST_OUTPUT_S)
    return 1


def _show_line(console: Console, name: str, line: str, verbose: bool) -> None:
    if verbose or any(word in line for word in _SHOWN):
        console.print(f"{name} | {line}", markup=False, highlight=False, style="dim", soft_wrap=True)


def _welcome(console: Console, host: str, port: int, model: str, seconds: float) -> None:
    url = f"http://{in_url(host)}:{port}"
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    text = f"[bold]chat:[/]  {url}\n[bold]stop:[/]  Ctrl-C"
    console.print(Panel(text, title=f"kvbaton is up ({seconds:.0f} s)", border_style="green", expand=False))
    request = f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    console.print("or paste this:\n\n" + request + "\n", markup=False, highlight=False, soft_wrap=True)
