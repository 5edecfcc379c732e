"""The vLLM connector: hands caches over between vLLM instances, without a patch to vLLM.

vLLM loads it by name: `"kv_connector": "KVBatonConnector"`, which `register` makes known as an entry point of vLLM, or with
`"kv_connector_module_path": "kvbaton.engines.vllm"`. Everything else in this room works, and can be tested, without vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

__all__ = ["KVBatonConnector", "register"]

_NAME = "KVBatonConnector"


def __getattr__(name: str) -> Any:
    """`KVBatonConnector`, imported when it is asked for: only that needs vLLM."""
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvbaton.engines.vllm.connector import KVBatonConnector

    return KVBatonConnector


def register() -> None:
    """The entry point that vLLM calls in every process: from then on the name alone selects the connector. Idempotent.

    vLLM does not survive a plugin that raises, and calls it for every model that is served beside kvbaton. So a release whose
    factory is elsewhere costs a line in the log, and not the server.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        logging.getLogger(__name__).warning("%s is not known to vLLM by its name: %s", _NAME, error)
        return
    with contextlib.suppress(ValueError):  # it has that name already
        KVConnectorFactory.register_connector(_NAME, f"{__name__}.connector", _NAME)
