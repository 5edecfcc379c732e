"""The lines that start stock engines on the drop-in: the connector and the backend are theirs, only `mori` is ours."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from kvbaton.compat.mori.settings import COUNTS, DROP_STORES, SWITCH
from kvbaton.transport.table import exchange_names

__all__ = ["PAGE_ALIGNED", "MoriLines", "switch_variables"]

PAGE_ALIGNED = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Environment in which torch begins every large allocation of main memory on a page. vLLM's MoRIIOConnector needs a cache that
begins on one, else its server ends at its start; without this, torch for x86-64 begins 64 bytes further on."""

_PORTS_EACH = 10


def switch_variables(transport: str, dropped: str, counts_directory: str) -> dict[str, str]:
    """The environment that puts a stock engine on the drop-in; `transport` names its paths if the exchange has such.

    `dropped` is what a negative control does not store, empty for none.
    """
    variables = {SWITCH: transport if transport in exchange_names() else "auto"}
    variables |= {DROP_STORES: dropped} if dropped else {}
    return variables | ({COUNTS: counts_directory} if counts_directory else {})


@dataclass(frozen=True, slots=True)
class MoriLines:
    """A prefill and a decode instance of each engine on one host; those of vLLM register with `router`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8100
    router: str = "127.0.0.1:8001"
    reads: bool = False
    paths: str = "auto"

    def vllm(self) -> list[str]:
        """`vllm serve` with vLLM's own MoRIIOConnector: prefill, then decode."""
        return [self._vllm(role, self.port + at * _PORTS_EACH) for at, role in enumerate(("kv_producer", "kv_consumer"))]

    def sglang(self) -> list[str]:
        """`sglang.launch_server` with SGLang's own mori backend: prefill, then decode."""
        return [self._sglang(role, self.port + at * _PORTS_EACH) for at, role in enumerate(("prefill", "decode"))]

    def _vllm(self, role: str, port: int) -> str:
        proxy, _, ping_port = self.router.rpartition(":")
        extra = {
            "proxy_ip": proxy,
            "proxy_ping_port": int(ping_port),
            "host_ip": self.host,
            "http_port": port,
            "handshake_port": port + 1,
            "notify_port": port + 2,
            "read_mode": self.reads,
        }
        config = {"kv_connector": "MoRIIOConnector", "kv_role": role, "kv_connector_extra_config": extra}
        command = ["vllm", "serve", self.model, "--host", self.host, "--port", str(port)]
        return self._line([*command, "--kv-transfer-config", json.dumps(config)], PAGE_ALIGNED)

    def _sglang(self, role: str, port: int) -> str:
        command = ["python", "-m", "sglang.launch_server", "--model-path", self.model, "--host", self.host, "--port", str(port)]
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mori"]
        if role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(port + 1)]
        else:
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        return self._line([*command, "--disable-overlap-schedule"], {})

    def _line(self, command: list[str], more: Mapping[str, str]) -> str:
        variables = {SWITCH: self.paths, **more}
        return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(command)])
