"""SGLang servers as parts of a local set-up, and the command line that starts one with the backend."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvbaton.compat.mori.command_lines import switch_variables
from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.topology import Shape
from kvbaton.engines.base import EngineOptions, PreparedEngine, ssl_arguments
from kvbaton.engines.hosted_settings import changed_options
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE
from kvbaton.engines.sglang.setup.environment import SglangEnvironment
from kvbaton.launch.fleet import FleetPart, core_share
from kvbaton.launch.ports import PortPicker

__all__ = ["BACKENDS", "MAX_MODEL_TOKENS", "SglangServers", "backend_settings", "serve_arguments"]

MAX_MODEL_TOKENS = 2048
"""Prompt and answer together, in local set-ups."""

_HOST = "127.0.0.1"
_PAGE_TOKENS = 16
_BLOCK_TOKENS = 128
"""What `cache_blocks` counts; as many tokens as a block of vLLM on CPUs has, so that both get caches of the same size."""
_CACHE_TOKENS = 8192
_CHUNK_TOKENS = 512
_ON_CPUS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule "
    "--grammar-backend none --sleep-on-idle --mem-fraction-static 0.9 --max-running-requests 64"
).split()
"""The size of the cache is given, so the fraction only has to be large: what other programs take while a server starts counts
as its weights, and a server for which too little is left ends."""
_DECODE = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
"""The default backup of a preempted request needs a GPU."""


def backend_settings(handoff: HandoffSettings, extra: dict[str, Any]) -> dict[str, Any]:
    """The value of the variable that configures the backend, before it is encoded."""
    return changed_options(handoff) | extra


def serve_arguments(model: str, host: str, port: int, role: str, backend: str, bootstrap_port: int) -> list[str]:
    """The arguments of `sglang.launch_server` that make it one side of a pair; role `both` is a plain server."""
    arguments = ["--model-path", model, "--host", host, "--port", str(port)]
    if role == "both":
        return arguments
    arguments += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
    return arguments + (["--disaggregation-bootstrap-port", str(bootstrap_port)] if role == "prefill" else [])


@dataclass(frozen=True, slots=True)
class SglangServers(PreparedEngine):
    """An installed SGLang and a model that it can load, ready to be served."""

    environment: SglangEnvironment
    model: Path
    options: EngineOptions
    settings: dict[str, Any] = field(default_factory=dict)
    """More settings of the backend."""

    def part(self, name: str, role: str, ports: PortPicker, routers: Sequence[str] = ()) -> FleetPart:
        """One SGLang server; role `both` is a plain server without any backend."""
        if role == "both":
            return self.plain_part(name, role, "", ports, 0)
        return BACKENDS[self.options.connector](self, name, role, ports, routers)

    def plain_part(self, name: str, role: str, backend: str, ports: PortPicker, bootstrap_port: int) -> FleetPart:
        """A server of this role with this backend."""
        options, port = self.options, ports.pick()
        shape = Shape.parse(options.shape)
        cache_tokens = _CACHE_TOKENS if options.cache_blocks is None else options.cache_blocks * _BLOCK_TOKENS
        arguments = serve_arguments(str(self.model), _HOST, port, role, backend, bootstrap_port)
        arguments += ["--served-model-name", options.served_name or options.model, "--dtype", options.cache_dtype]
        arguments += [*_ON_CPUS, "--page-size", str(_PAGE_TOKENS), "--max-total-tokens", str(cache_tokens)]
        arguments += ["--context-length", str(MAX_MODEL_TOKENS)]
        arguments += ["--chunked-prefill-size", str(options.step_tokens or _CHUNK_TOKENS)]
        arguments += [*_DECODE] if role == "decode" else []
        ranks = shape.dp * shape.tp * shape.pp
        variables = {**self.environment.variables(), **core_share(options.sharing * ranks)}
        # Copies of an instance would all take the port that is given; SGLang finds one for each.
        arguments += ["--dp-size", str(shape.dp)] if shape.dp > 1 else ["--nccl-port", str(ports.pick())]
        if shape.tp > 1:
            arguments += ["--tp-size", str(shape.tp)]
        if shape.pp > 1:
            arguments += ["--pp-size", str(shape.pp)]
        if ranks > 1:
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        variables |= options.tls_variables()
        arguments += ssl_arguments(options.tls_dir)
        url = f"{options.scheme}://{_HOST}:{port}"
        command = [*self.environment.command, *arguments, *options.arguments]
        return FleetPart(name, command, f"{url}/health", variables, base_url=url, tls_dir=options.tls_dir)


def _with_kvbaton(servers: SglangServers, name: str, role: str, ports: PortPicker, routers: Sequence[str]) -> FleetPart:
    options, controls = servers.options, servers.options.controls
    control_port, handoffs_port = ports.pick(), ports.pick()
    extra: dict[str, Any] = {"transport": options.transport, "handoffs_port": handoffs_port, "routers": list(routers)}
    extra |= {"control_port": control_port} if role == "decode" else {}
    extra |= {control: True for control in ("poison", "drop_writes") if getattr(controls, control)}
    extra |= {"fingerprint": options.model_id} if options.model_id else {}
    extra |= servers.settings
    part = servers.plain_part(name, role, "kvbaton", ports, control_port)
    variables = {CONFIG_VARIABLE: json.dumps(backend_settings(options.handoff, extra))}
    return replace(
        part,
        environment=part.environment | variables | options.trust_variables(),
        control_address=str(ControlAddress.of(_HOST, control_port)),
        handoffs_address=f"{_HOST}:{handoffs_port}",
    )


def _with_own(servers: SglangServers, name: str, role: str, backend: str, ports: PortPicker) -> FleetPart:
    """A backend that SGLang ships. It registers with no router: clients, balancers or a list of instances name the pair."""
    bootstrap_port = ports.pick()
    part = servers.plain_part(name, role, backend, ports, bootstrap_port)
    control_address = str(ControlAddress.of(_HOST, bootstrap_port))
    listed: dict[str, str | int] = {"type": "P" if role == "prefill" else "D", "transfer_mode": "WRITE"}
    listed |= {"http_address": part.base_url.partition("://")[2], "zmq_address": control_address}
    listed |= {"dispatch": "bootstrap", "bootstrap_port": bootstrap_port}
    return replace(part, control_address=control_address, listed=listed)


def _with_nixl(servers: SglangServers, name: str, role: str, ports: PortPicker, routers: Sequence[str]) -> FleetPart:
    """The NIXL backend that SGLang ships; to compare with."""
    del routers
    return _with_own(servers, name, role, "nixl", ports)


def _with_mori(servers: SglangServers, name: str, role: str, ports: PortPicker, routers: Sequence[str]) -> FleetPart:
    """The mori backend that SGLang ships, unchanged, on kvbaton's drop-in for `mori`."""
    del routers
    part = _with_own(servers, name, role, "mori", ports)
    options = servers.options
    dropped = "gpu" if options.controls.drop_writes else ""
    mori = switch_variables(options.transport, dropped, options.counts_directory)
    return replace(part, environment=part.environment | mori)


BACKENDS: dict[str, Callable[[SglangServers, str, str, PortPicker, Sequence[str]], FleetPart]] = {
    "kvbaton": _with_kvbaton,
    "nixl": _with_nixl,
    "mori": _with_mori,
}
"""Describes a server with each of the backends that can be chosen."""
