"""`KVBatonConnector` in Ray's own LLM stack, whose replicas load this module; see `register_connector` of `deploy/ray.py`.

Ray's application asks prefill first and passes its `kv_transfer_params` on to decode, which kvbaton reads as they are. What is
left to do in each replica is the control address: Ray knows the node, and the configuration of a deployment cannot.
"""

from __future__ import annotations

from typing import Any

import ray.util
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import BaseConnectorBackend, DefaultPDProtocolMixin

from kvbaton.core.handoff import Mode
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker

__all__ = ["KVBatonBackend"]


class KVBatonBackend(DefaultPDProtocolMixin, BaseConnectorBackend):
    """Gives each replica its control address; requests are shaped as Ray does by default."""

    def setup(self) -> None:
        """Called in each replica before its engine starts. What is configured stays. Raises ConfigError."""
        extra: dict[str, Any] = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        if extra.get("mode", Mode.PULL) != Mode.PULL:
            raise ConfigError(f"mode is {extra['mode']!r}; Ray's application asks prefill before decode, so it must be 'pull'")
        # A free port, not one counted from a base: replicas of both deployments may share a node, and peers learn the address
        # from the answer of the prefill instance.
        found = {"mode": str(Mode.PULL), "transport": "tcp", "control_port": PortPicker().pick()}
        for name, value in {**found, "control_host": str(ray.util.get_node_ip_address())}.items():
            extra.setdefault(name, value)
