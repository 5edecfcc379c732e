"""vLLM servers as parts of a local set-up, and the command line that starts one with the connector."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbaton.config import CLUSTER_KEY_VARIABLE, DEFAULT_HANDOFF, HandoffSettings
from kvbaton.launch.fleet import Part, core_share
from kvbaton.launch.local import new_cluster_key
from kvbaton.launch.ports import PortPicker
from kvbaton.launch.vllm_environment import VllmEnvironment

__all__ = [
    "MAX_MODEL_TOKENS",
    "VllmOptions",
    "nixl_part",
    "serve_arguments",
    "transfer_config",
    "vllm_pair_parts",
    "vllm_part",
]

MAX_MODEL_TOKENS = 2048
"""Prompt and answer together, in local set-ups."""

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What every vLLM server of a set-up has in common."""

    environment: VllmEnvironment
    model: Path
    served_name: str
    transport: str
    engines: int
    handoff: HandoffSettings = DEFAULT_HANDOFF
    settings: dict[str, Any] = field(default_factory=dict)
    """More of `kv_connector_extra_config`."""
    arguments: tuple[str, ...] = ()
    """More arguments for `vllm serve`."""
    cache_gib: int = 1
    cluster_key: str = field(default_factory=new_cluster_key, repr=False)


def transfer_config(role: str, handoff: HandoffSettings, extra: dict[str, Any]) -> dict[str, Any]:
    """The value of `--kv-transfer-config` for an instance of this role."""
    how: dict[str, Any] = {"mode": str(handoff.mode), "integrity": str(handoff.integrity)}
    how |= {"unfenced_writes": True} if handoff.unfenced_writes else {}
    return {
        "kv_connector": "KVBatonConnector",
        "kv_connector_module_path": "kvbaton.engines.vllm",
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": str(handoff.on_failure),
        "kv_connector_extra_config": {**how, **extra},
    }


def serve_arguments(model: str, host: str, port: int, config: dict[str, Any] | None) -> list[str]:
    """What follows `vllm` on the command line."""
    arguments = ["serve", model, "--host", host, "--port", str(port)]
    return arguments if config is None else [*arguments, "--kv-transfer-config", json.dumps(config)]


def vllm_part(name: str, role: str, options: VllmOptions, ports: PortPicker, routers: Sequence[str] = ()) -> tuple[Part, str]:
    """One vLLM server on free loopback ports, and its base URL; role `both` is a plain server without the connector."""
    port = ports.pick()
    config = None
    if role != "both":
        extra = {"control_port": ports.pick(), "transport": options.transport, "http_address": f"127.0.0.1:{port}"}
        extra |= {"handoffs_port": ports.pick(), "routers": list(routers), **options.settings}
        config = transfer_config(role, options.handoff, extra)
    return _part(name, options, port, config, {CLUSTER_KEY_VARIABLE: options.cluster_key})


def nixl_part(name: str, role: str, options: VllmOptions, ports: PortPicker) -> tuple[Part, str]:
    """One vLLM server with the NixlConnector that vLLM ships, as its documentation has it; to compare with."""
    config = {"kv_connector": "NixlConnector", "kv_role": _ROLES[role], "kv_buffer_device": "cpu"}
    port = ports.pick()
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.pick())}
    return _part(name, options, port, config, side_channel)


def _part(
    name: str, options: VllmOptions, port: int, config: dict[str, Any] | None, environment: dict[str, str]
) -> tuple[Part, str]:
    arguments = serve_arguments(str(options.model), "127.0.0.1", port, config)
    arguments += ["--served-model-name", options.served_name, "--dtype", "float32", "--enforce-eager"]
    arguments += ["--max-model-len", str(MAX_MODEL_TOKENS), *options.arguments]
    variables = {
        **options.environment.variables(),
        **core_share(options.engines),
        "VLLM_CPU_KVCACHE_SPACE": str(options.cache_gib),
        **environment,
    }
    url = f"http://127.0.0.1:{port}"
    return Part(name, [*options.environment.command, *arguments], f"{url}/health", variables), url


def vllm_pair_parts(prefill: int, decode: int, options: VllmOptions, ports: PortPicker, discovery_port: int) -> list[Part]:
    """`prefill` prefill and `decode` decode servers that register with the router at `discovery_port`."""
    routers = [f"127.0.0.1:{discovery_port}"]
    return [
        vllm_part(f"{role}-{index}", role, options, ports, routers)[0]
        for role, count in (("prefill", prefill), ("decode", decode))
        for index in range(count)
    ]
