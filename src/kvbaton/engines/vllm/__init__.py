"""The vLLM connector: hands caches over between vLLM instances, without a patch to vLLM.

vLLM loads it by name: `"kv_connector": "KVBatonConnector", "kv_connector_module_path": "kvbaton.engines.vllm"`. Everything
else in this room works, and can be tested, without vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVBatonConnector"]


def __getattr__(name: str) -> Any:
    """`KVBatonConnector`, imported when it is asked for: only that needs vLLM."""
    if name != "KVBatonConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvbaton.engines.vllm.connector import KVBatonConnector

    return KVBatonConnector
