"""vLLM servers as parts of a local set-up, and the command line that starts one with the connector."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvbaton.compat.mori.command_lines import PAGE_ALIGNED, switch_variables
from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress, in_url
from kvbaton.core.handoff import Mode
from kvbaton.core.topology import Shape
from kvbaton.engines.base import EngineOptions, PreparedEngine, ssl_arguments
from kvbaton.engines.hosted_settings import changed_options
from kvbaton.engines.vllm.setup.environment import VllmEnvironment
from kvbaton.errors import ConfigError
from kvbaton.launch.fleet import FleetPart, core_share
from kvbaton.launch.ports import PortPicker

__all__ = [
    "CONNECTORS",
    "GPU_MODEL_TOKENS",
    "MAX_MODEL_TOKENS",
    "VllmServers",
    "check_shape",
    "gpu_cache_bytes",
    "https_arguments",
    "serve_arguments",
    "transfer_config",
]

MAX_MODEL_TOKENS = 2048
"""Prompt and answer together, in local set-ups on CPUs."""

GPU_MODEL_TOKENS = 10_240
"""The same on a GPU."""

_GPU_SHARE = 0.93
"""Of the memory of a GPU, for all servers together."""
_GPU_CACHE_TOKENS = 32_768
"""What the cache of a server on a GPU holds."""
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def transfer_config(role: str, handoff: HandoffSettings, extra: dict[str, Any]) -> dict[str, Any]:
    """The value of `--kv-transfer-config` for an instance of this role."""
    return {
        "kv_connector": "KVBatonConnector",
        "kv_connector_module_path": "kvbaton.engines.vllm",
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": str(handoff.on_failure),
        "kv_connector_extra_config": {**changed_options(handoff), **extra},
    }


def serve_arguments(model: str, host: str, port: int, config: dict[str, Any] | None) -> list[str]:
    """What follows `vllm` on the command line."""
    arguments = ["serve", model, "--host", host, "--port", str(port)]
    return arguments if config is None else [*arguments, "--kv-transfer-config", json.dumps(config)]


def check_shape(text: str) -> Shape:
    """The shape of a server. Raises ConfigError for one that vLLM has no arguments for."""
    shape = Shape.parse(text)
    if shape.cp > 1:
        raise ConfigError(f"shape {text} has cp{shape.cp}; with vLLM on CPUs a shape is made of dp, pp and tp")
    return shape


def _shape_arguments(shape: Shape) -> list[str]:
    sizes = {"--tensor-parallel-size": shape.tp, "--pipeline-parallel-size": shape.pp, "--data-parallel-size": shape.dp}
    return [part for option, size in sizes.items() if size > 1 for part in (option, str(size))]


def _eager_arguments(shape: Shape) -> list[str]:
    """What keeps vLLM on CPUs from compiling kernels, which takes longer than it saves there.

    A server of several stages must run once before it serves, else its first request ends it: later stages make their input
    buffers then. vLLM skips that run with `--enforce-eager`, so those trace the model, and compile nothing.
    """
    return ["--enforce-eager"] if shape.pp == 1 else ["--compilation-config", json.dumps({"mode": 2, "backend": "eager"})]


@dataclass(frozen=True, slots=True)
class VllmServers(PreparedEngine):
    """An installed vLLM and a model that it can load, ready to be served."""

    environment: VllmEnvironment
    model: Path
    options: EngineOptions
    settings: dict[str, Any] = field(default_factory=dict)
    """More of `kv_connector_extra_config`."""
    cache_bytes: int = 1 << 30
    """Of each rank."""
    context_tokens: int = MAX_MODEL_TOKENS
    """Prompt and answer together."""

    def part(self, name: str, role: str, ports: PortPicker, routers: Sequence[str] = ()) -> FleetPart:
        """One vLLM server; role `both` is a plain server without any connector."""
        port = ports.pick()
        if role == "both":
            return self.plain_part(name, port, None)
        return CONNECTORS[self.options.connector](self, name, role, port, ports, routers)

    def plain_part(self, name: str, port: int, config: dict[str, Any] | None) -> FleetPart:
        """A server with this `--kv-transfer-config`, or without one."""
        options, shape = self.options, check_shape(self.options.shape)
        arguments = [*serve_arguments(str(self.model), options.host, port, config), *_shape_arguments(shape)]
        arguments += ["--max-model-len", str(self.context_tokens)]
        arguments += ["--enforce-eager"] if options.device != "cpu" else _eager_arguments(shape)
        arguments += ["--kv-cache-memory-bytes", str(self.cache_bytes)]
        arguments += ["--served-model-name", options.served_name or options.model, "--dtype", options.cache_dtype]
        if options.cache_blocks is not None:
            arguments += ["--num-gpu-blocks-override", str(options.cache_blocks)]
        if options.step_tokens is not None:
            arguments += ["--max-num-batched-tokens", str(options.step_tokens)]
        variables = self.environment.variables()
        if options.device == "cpu":
            variables |= core_share(options.sharing * shape.ranks * shape.dp)
        else:
            arguments += _gpu_arguments(options)
            # Triton rounds the numbers of a product to 19 bits otherwise, differently in prefill and in decode.
            variables["TRITON_F32_DEFAULT"] = "ieee"
        variables |= options.tls_variables()
        arguments += https_arguments(options.tls_dir)
        url = f"{options.scheme}://{in_url(options.host)}:{port}"
        command = [*self.environment.command, *arguments, *options.arguments]
        return FleetPart(name, command, f"{url}/health", variables, base_url=url, tls_dir=options.tls_dir)


def https_arguments(tls_dir: Path | None) -> list[str]:
    """HTTPS with these certificates, for clients that show one of the same authority."""
    return [*ssl_arguments(tls_dir), "--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED))] if tls_dir is not None else []


def _gpu_arguments(options: EngineOptions) -> list[str]:
    """Several servers share one GPU, each with its part of the memory.

    No prefixes are cached: a request would be computed in other steps than on the server that it is compared with, and round
    differently.
    """
    share = f"{_GPU_SHARE / max(options.sharing, 1):.3f}"
    arguments = ["--gpu-memory-utilization", share, "--no-enable-prefix-caching"]
    # FlashAttention has no kernels for float32; Triton's are compiled on the machine, for every type.
    return arguments + (["--attention-backend", "TRITON_ATTN"] if options.cache_dtype == "float32" else [])


def gpu_cache_bytes(model: Path, dtype: str) -> int:
    """The size of the cache of a server on a GPU. Raises ConfigError for a directory whose configuration does not show it.

    vLLM would measure what is free, and takes what another server allocates meanwhile for its own.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
        channels = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model is {model}: its config.json does not show how large its cache is ({error!r})") from error
    return int(_GPU_CACHE_TOKENS * 2 * layers * heads * channels * (4 if dtype == "float32" else 2))


def _with_kvbaton(
    servers: VllmServers, name: str, role: str, port: int, ports: PortPicker, routers: Sequence[str]
) -> FleetPart:
    options, controls, host = servers.options, servers.options.controls, servers.options.host
    engines = check_shape(options.shape).dp
    extra: dict[str, Any] = {"control_port": ports.pick(engines), "transport": options.transport}
    extra |= {"control_host": host, "http_address": f"{in_url(host)}:{port}"}
    extra |= {"handoffs_port": ports.pick(engines), "routers": list(routers)}
    extra |= {"dp_size": engines} if engines > 1 else {}
    drop = "writes" if controls.drop_writes else controls.drop
    extra |= ({"poison": True} if controls.poison else {}) | ({"drop": drop} if drop else {})
    extra |= servers.settings
    part = servers.plain_part(name, port, transfer_config(role, options.handoff, extra))
    return replace(
        part,
        environment=part.environment | options.trust_variables(),
        control_address=str(ControlAddress.of(host, extra["control_port"])),
        handoffs_address=f"{in_url(host)}:{extra['handoffs_port']}",
    )


def _with_nixl(servers: VllmServers, name: str, role: str, port: int, ports: PortPicker, routers: Sequence[str]) -> FleetPart:
    """The NixlConnector that vLLM ships, as its documentation has it; to compare with."""
    del routers  # It registers with no router: its clients forward `kv_transfer_params` themselves.
    config = {"kv_connector": "NixlConnector", "kv_role": _ROLES[role], "kv_buffer_device": servers.options.device}
    part = servers.plain_part(name, port, config)
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": servers.options.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.pick())}
    return replace(part, environment=part.environment | side_channel)


def _with_moriio(servers: VllmServers, name: str, role: str, port: int, ports: PortPicker, routers: Sequence[str]) -> FleetPart:
    """The MoRIIOConnector that vLLM ships, unchanged, on kvbaton's drop-in for `mori`."""
    options = servers.options
    extra: dict[str, Any] = {
        "host_ip": options.host,
        "http_port": port,
        "handshake_port": ports.pick(),
        "notify_port": ports.pick(),
        "read_mode": options.handoff.mode is Mode.PULL,
    }
    if routers:
        proxy, _, ping_port = routers[0].rpartition(":")
        extra |= {"proxy_ip": proxy, "proxy_ping_port": int(ping_port)}
    config = {"kv_connector": "MoRIIOConnector", "kv_role": _ROLES[role], "kv_connector_extra_config": extra | servers.settings}
    part = servers.plain_part(name, port, config)
    dropped = "1" if options.controls.drop_writes else ""
    mori = switch_variables(options.transport, dropped, options.counts_directory)
    mori |= PAGE_ALIGNED if options.device == "cpu" else {}
    return replace(part, environment=part.environment | mori)


CONNECTORS: dict[str, Callable[[VllmServers, str, str, int, PortPicker, Sequence[str]], FleetPart]] = {
    "kvbaton": _with_kvbaton,
    "nixl": _with_nixl,
    "moriio": _with_moriio,
}
"""Describes a server with each of the connectors that can be chosen."""
