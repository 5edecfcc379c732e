"""`NixlConnector` that is kvbaton's, for launchers that accept no other name. Imports vLLM.

`"kv_connector": "NixlConnector", "kv_connector_module_path": "kvbaton.engines.vllm.nixl_alias"`: vLLM takes the class of that
module before its own one. Requests are those of NIXL's proxies, which `engines/handoff_params.py` reads anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvbaton.engines.vllm.connector import KVBatonConnector
from kvbaton.engines.vllm.nixl_settings import parse_nixl_settings
from kvbaton.engines.vllm.settings import ConnectorSettings

__all__ = ["NixlConnector"]


class NixlConnector(KVBatonConnector):
    """`KVBatonConnector` under the name of vLLM's connector for NIXL, with its address from NIXL's variables."""

    @staticmethod
    def read_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
        """The settings, with the defaults of a set-up that was made for NIXL."""
        return parse_nixl_settings(extra_config, os.environ)


def _take_name() -> None:
    """Let vLLM's MultiConnector read our statistics with our class: it looks its parts up by the name of their class."""
    registry = getattr(KVConnectorFactory, "_registry", None)
    if isinstance(registry, dict):
        registry[NixlConnector.__name__] = lambda: NixlConnector


_take_name()
